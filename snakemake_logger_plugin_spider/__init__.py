"""Snakemake's logger plugin `spider`. Snakemake finds plugins by the name of such a package."""

from spider.workflow.progress import LogHandler

__all__ = ["LogHandler"]
