"""`spider config`: the schema of configurations."""

from __future__ import annotations

import json

import click


@click.group()
def config() -> None:
    """The schema of configurations."""


@config.command()
def schema() -> None:
    """Print the JSON schema of configurations, for editors."""
    from spider.config.json_schema import json_schema

    click.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))
