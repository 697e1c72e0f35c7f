"""`spider clean`: remove what no configuration reaches."""

from __future__ import annotations

import click

from spider.cli.session import Session, command, log


@command()
@click.option("--newest", is_flag=True, help="Count only the newest configuration, not all that were used.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
def clean(session: Session, newest: bool, yes: bool) -> None:
    """List what no configuration in the results folder reaches, and remove it after asking.

    This concerns runs, stages, shards, tokenizers, n-gram indexes, baselines and compile caches. A run that
    was trained by hand with other settings is in no configuration, so it is listed too.
    """
    from spider.clean import leftovers
    from spider.common.formatting import quantity
    from spider.common.results import check_root

    root = session.results.root
    check_root(root)
    found = leftovers(root, newest=newest)
    if not found:
        click.echo(f"{root}: every result is reached by a configuration")
        return
    sizes = [one.bytes for one in found]
    for one, size in zip(found, sizes, strict=True):
        click.echo(f"{quantity(size, 'B'):>8}  {one.kind}: {one.path}")
    click.echo(f"{quantity(sum(sizes), 'B'):>8}  in all")
    if not yes:
        click.confirm("Remove all of this?", abort=True)
    for one in found:
        one.remove()
        log.info("removed %s", one.path)
