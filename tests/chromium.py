"""A headless browser for tests and for pictures of pages: Debian's Chromium, driven by playwright.

    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(path.as_uri())

Playwright's own browsers are not used: they are a download that a closed network does not have. A test asks
for the fixture `browser` of tests/browser/conftest.py, which skips where Debian's cannot be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAM = "/usr/bin/chromium"

#: As root Chromium has no sandbox. The others keep it from calling home and from needing a GPU.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window; it and all its pages close at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
