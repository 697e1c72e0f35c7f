"""`spider config`: all keys of a configuration, for editors and for people."""

from __future__ import annotations

import json

import click


@click.group()
def config() -> None:
    """All keys of a configuration, for editors and for people."""


@config.command()
def schema() -> None:
    """Print the JSON schema of configurations, for editors."""
    from spider.config.reference import json_schema

    click.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))


@config.command()
def reference() -> None:
    """Print all keys with type, default and meaning, as Markdown."""
    from spider.config.reference import reference

    click.echo(reference(), nl=False)
