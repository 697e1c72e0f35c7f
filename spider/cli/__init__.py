"""The ``spider`` command: parse, call one function, say what came of it.

Each rule of the workflow is one command here, and each command can be run by hand. Heavy libraries are
imported by the command that needs them, so that ``spider encode`` never pays for torch. Exit codes: 0 done, 1
an error that the message explains, 2 wrong usage, 75 (EX_TEMPFAIL) stopped by a signal with everything saved:
run it again."""

from __future__ import annotations

import errno
import faulthandler
import json
import logging
import os
import sys
from pathlib import Path

import click

from spider.cli import data, evaluate, model, train
from spider.cli.chat import chat
from spider.cli.harness import harness
from spider.cli.session import FILE, Group, Session, allow_imports_of, grow_segments, log
from spider.config.imports import allow_import
from spider.processes.wait_policy import set_wait_policy
from spider.results import write_config
from spider.version import VERSION

_COMMANDS = (
    *(
        data.download,
        data.tokenizer,
        data.encode,
        data.index,
        data.pack,
        data.count_ngrams,
        data.build_ngrams,
        data.verify,
        data.inspect,
    ),
    *(train.warmup, train.train),
    *(evaluate.evaluate, evaluate.sample, evaluate.draw),
    *(evaluate.compare, evaluate.report, evaluate.scaling, evaluate.track),
    *(model.describe, model.generate, chat, model.boundaries, harness, model.compress, model.checkpoint),
)
_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=Group, commands=_COMMANDS, context_settings=_HELP)
@click.version_option(VERSION)
@click.option(
    "--config",
    "path",
    type=FILE,
    default="config.yaml",
    show_default=True,
    help="Configuration to read; the workflow names its own copy in the results folder.",
)
@click.option("--configure", metavar="JSON", help="Read this, and keep it in its results folder.")
@click.option("--log", "log_path", type=FILE, help="Also write the log to this file.")
@click.option("--family-module", metavar="NAME", help="Import this family of models where a file names it.")
@click.pass_context
def cli(
    context: click.Context,
    path: Path,
    configure: str | None,
    log_path: Path | None,
    family_module: str | None,
) -> None:
    """Raw text to a trained, evaluated, tracked language model."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log_path:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_path, encoding="utf-8"))
    form = f"%(asctime)s {context.invoked_subcommand}: %(message)s"
    logging.basicConfig(handlers=handlers, format=form, datefmt="%H:%M:%S", level="WARNING", force=True)
    log.setLevel(logging.INFO)
    if configure:
        config = json.loads(configure)
        path = write_config(Path(config["results"]), config)
    if family_module:
        allow_import(family_module)
    allow_imports_of(path)
    context.obj = Session(path)


_REMEDIES = {
    errno.ENOSPC: "no space left on the disk; free some and run the same command again",
    errno.EDQUOT: "disk quota exceeded; free some space and run the same command again",
    errno.EROFS: "the file system is read-only; name a writable folder under `results:`",
    errno.EACCES: "permission denied; name a folder you may write under `results:`",
}


def _status() -> int:
    """Of the command line. Errors for people go to stderr as one message, bugs keep their traceback."""
    try:
        cli(standalone_mode=False)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        log.error("interrupted; run the same command again to go on")
        return 130
    except ValueError as error:
        log.error("error: %s", error)
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            where = f"{error.filename}: " if error.filename else ""
            log.error("error: %s%s", where, _REMEDIES.get(error.errno, error.strerror))
            return 1
        if not hasattr(error, "exit_code"):
            raise
        log.warning("%s", error)
        return int(error.exit_code)
    return 0


def main() -> None:
    """The console script; one of several processes leaves without taking torch down.

    A process group that goes down while an exchange is being forgotten waits for the interpreter's lock,
    which its own destructor holds: for ever, and all other processes with it.
    """
    set_wait_policy()
    # A truncated file that is mapped ends the process by SIGBUS; this shows where it was read.
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    grow_segments()
    status = _status()
    if "LOCAL_WORLD_SIZE" in os.environ:
        logging.shutdown()
        os._exit(status)
    sys.exit(status)
