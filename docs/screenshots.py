"""Make the pictures of MLflow for docs/tracking.md and of the model card for docs/checkpoints.md.

    python docs/screenshots.py RESULTS [FOLDER] [--only card] [--width 700]

Run it in the folder from which the workflow of RESULTS ran. `spider track ui` serves the pages, and a
headless Chromium takes the screenshots. The card is that of an export of the last stage of the first run,
with its Markdown rendered as on a hub. Install Playwright and Chromium with ``pip install -e '.[dev]'`` and
``apt-get install chromium``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mlflow import MlflowClient

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from spider.tracking.pages import COLUMNS, VIEWS, opening  # noqa: E402
from tests.chromium import chromium  # noqa: E402 (tests/ is not part of the package)

PORT = 5077
MODE = "workflowType=machine_learning"
#: Keys of the browser's storage that keep MLflow from opening a panel over the page.
SEEN = """
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
"""


@contextmanager
def pages(results: Path) -> Iterator[str]:
    """Serve `spider track ui` over ``results`` and yield its address."""
    address = f"http://127.0.0.1:{PORT}"
    spider = Path(sys.executable).parent / "spider"
    command = [spider, "--config", results / "config.yaml", "track", "ui", "--port", str(PORT)]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2).close()
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit("the server ended; its message is above")
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def comparison(page: Page, address: str, ids: dict[str, str]) -> None:
    """Show the page that the printed address opens: the best run first, its curve and its figures."""
    page.set_viewport_size({"width": 1500, "height": 860})
    page.goto(address + opening(ids["Training"]))
    cards = page.locator("[data-testid=experiment-view-compare-runs-card]")
    cards.first.locator("path.js-line").first.wait_for(state="attached")
    cards.nth(len(COLUMNS)).locator(".bartext").first.wait_for()


def table(page: Page, address: str, ids: dict[str, str]) -> None:
    """Show the same runs as a table."""
    page.set_viewport_size({"width": 1500, "height": 460})
    page.goto(address + opening(ids["Training"], charts=False))
    page.locator("[role=columnheader][col-id^='metrics.']").nth(len(COLUMNS) - 1).wait_for()


def checkpoints(page: Page, address: str, ids: dict[str, str]) -> None:
    """Show all checkpoints, the best first."""
    page.goto(address + opening(ids["Checkpoints"], charts=False))
    page.locator("[role=columnheader][col-id^='metrics.']").nth(len(VIEWS["Checkpoints"]) - 1).wait_for()


def models(page: Page, address: str, ids: dict[str, str]) -> None:
    """Show the checkpoints as models."""
    page.goto(f"{address}/#/experiments/{ids['Training']}/models?{MODE}")
    page.get_by_text("-step-").first.wait_for()


def jobs(page: Page, address: str, ids: dict[str, str]) -> None:
    """Show the jobs of the workflow, expanded."""
    page.goto(f"{address}/#/experiments/{ids['Pipeline']}/runs?{MODE}")
    page.locator("[role=row] button[data-component-id*=runnamecellrenderer]").first.click()
    page.get_by_role("link", name="train ").first.wait_for()


CARD_STYLE = """
body { font: 14px/1.5 "DejaVu Sans", sans-serif; margin: 28px 36px; color: #1f2328; columns: 2 }
body { column-gap: 48px } h1 { column-span: all; margin: 0 0 12px } h2, h3 { margin: 16px 0 8px }
h2 { border-bottom: 1px solid #d1d9e0 } h2, h3 { break-after: avoid } p, table { break-inside: avoid }
table { border-collapse: collapse; font-size: 12px } td, th { border: 1px solid #d1d9e0; padding: 3px 8px }
code { font: 12px/1.5 "DejaVu Sans Mono", monospace; background: #f6f8fa; padding: 1px 4px }
pre { background: #f6f8fa; padding: 8px 10px; border-radius: 6px } pre code { padding: 0 }
"""


def model_card(results: Path) -> str:
    """Return the HTML page of a card, without its front matter."""
    from markdown_it import MarkdownIt

    from spider.config import load_config
    from spider.publish.export import export

    config = load_config(results / "config.yaml")
    run, block = next(iter(config.runs.items()))
    with TemporaryDirectory() as folder:
        made = export(results / "runs" / run / block.stages[-1].name, Path(folder) / "model")
        text = (made.path / "README.md").read_text(encoding="utf-8").split("\n---\n", 1)[1]
    # A hub does not render HTML in a card; here it is escaped.
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text.rpartition("<!--")[0])
    return f"<!doctype html><meta charset=utf-8><style>{CARD_STYLE}</style>{body}"


def registry(page: Page, address: str, ids: dict[str, str]) -> None:
    """Show a run in the model registry: its versions, and the losses of the best."""
    page.goto(f"{address}/#/models/{MlflowClient(address).search_registered_models()[0].name}?{MODE}")
    page.locator("img[src^=get-artifact]").wait_for()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs/img")
    parser.add_argument("--only", help="card, page, comparison, table, checkpoints, models, jobs or registry")
    parser.add_argument("--width", type=int, default=1500, help="of the page of the first run, in pixels")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        if options.only in (None, "card"):
            page = browser.new_page(viewport={"width": 1360, "height": 720})
            page.set_content(model_card(options.results))
            shoot(page, options.folder / "model-card.png", full_page=True)
        if options.only == "page":
            page = browser.new_page(viewport={"width": options.width, "height": 900})
            page.goto(next((options.results / "report/runs").glob("*.html")).resolve().as_uri())
            shoot(page, options.folder / f"page-{options.width}.png", full_page=True)
        elif options.only != "card":
            tracking(browser, options.results, options.folder, options.only)


def tracking(browser: Browser, results: Path, folder: Path, only: str | None) -> None:
    """Take the screenshots of MLflow's pages, or of one of them."""
    with pages(results) as address:
        client = MlflowClient(address)
        ids = {e.name.split("/")[-1]: e.experiment_id for e in client.search_experiments()}
        for show in (comparison, table, checkpoints, jobs, registry, models):
            if show.__name__ != only and (only or show is models):
                continue
            page = browser.new_page(viewport={"width": 1500, "height": 720})
            page.set_default_timeout(120_000)
            page.add_init_script(SEEN)
            show(page, address, ids)
            page.wait_for_timeout(3000)  # MLflow lays out columns and charts
            shoot(page, folder / f"mlflow-{show.__name__}.png")


def shoot(page: Page, path: Path, **options: bool) -> None:
    page.screenshot(path=path, **options)
    print(path)
    page.close()


if __name__ == "__main__":
    main()
