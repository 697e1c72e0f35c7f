"""A dataset's settings for a test, at the schema's defaults but for what the test is about."""

from __future__ import annotations

from typing import Any

from spider.config import Dataset


def dataset(**settings: Any) -> Dataset:
    return Dataset.model_validate({"source": {"kind": "pydocs"}, **settings})
