from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.chromium import PROGRAM, chromium
from tests.debian import need

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return Debian's Chromium. The test skips where it is missing."""
    need({"chromium": PROGRAM})
    with chromium() as opened:
        yield opened
