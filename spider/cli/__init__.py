"""The ``spider`` command."""

from spider.cli.main import cli, main

__all__ = ["cli", "main"]
