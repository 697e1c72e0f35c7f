"""A headless browser for tests and for pictures of pages: Debian's Chromium under playwright.

    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(path.as_uri())

A machine without a network cannot download playwright's own browsers. Tests use the fixture `browser` of
tests/browser/conftest.py, which skips where Debian's Chromium is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAM = "/usr/bin/chromium"

#: Root must turn the sandbox off. The other flags avoid network requests and the GPU.
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
    """Return a browser without a window, which closes with all its pages at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
