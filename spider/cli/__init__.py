"""The ``spider`` command: parse, call one function, report the result.

Each rule of the workflow runs one command, and each command can be run by hand. A command imports the heavy
libraries that it needs itself, so that ``spider data encode`` imports no torch. A stage or a model is named
in one way everywhere: as RUN/STAGE of the configuration, or as a path.

Exit codes: 0 success; 1 an error with a message; 2 wrong usage; 75 (EX_TEMPFAIL) stopped by a signal after
everything was saved, so that the same command continues.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

import click

from spider.cli.session import FILE, Group, Session, grow_segments, leave_out_pandas, log
from spider.common import VERSION
from spider.common.formatting import OUTPUT
from spider.config.imports import allow_import
from spider.processes.wait_policy import set_wait_policy
from spider.provenance.codefiles import code_files, write_note


class Commands(Group):
    """Commands and groups of the modules of this package, imported one by one until a command is found."""

    MODULES = ("data", "train", "evaluate", "model", "inspect", "mirror")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for module in self.MODULES:
            if cmd_name not in self.commands:
                found = vars(import_module(f"spider.cli.{module}")).values()
                own = [one for one in found if isinstance(one, click.Command)]
                inside = [one for group in own for one in getattr(group, "commands", {}).values()]
                self.commands.update({str(one.name): one for one in own if one not in inside})
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        self.get_command(ctx, "")  # imports all modules
        return super().list_commands(ctx)


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=Commands, context_settings=_HELP)
@click.version_option(VERSION)
@click.option("--config", "path", type=FILE, default="config.yaml", show_default=True, help="Configuration.")
@click.option("--log", "log_path", type=FILE, help="File for a copy of the log.")
@click.option("--family-module", metavar="NAME", help="Family of models that a file may import.")
@click.pass_context
def cli(context: click.Context, path: Path, log_path: Path | None, family_module: str | None) -> None:
    """Train language models: from raw text to an evaluated and tracked model."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log_path:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if os.environ.get(OUTPUT) == "log":
            # What libraries, other processes and a crash print belongs into the log too.
            with open(log_path, "ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        else:
            handlers.append(logging.FileHandler(log_path, encoding="utf-8"))
    name, *rest = context.meta["spider.words"]
    if log_path and name == "data":  # a job, in a process of its own
        leave_out_pandas()
    if isinstance(cli.get_command(context, name), click.Group) and rest:
        name = f"{name} {rest[0]}"
    for level in (logging.INFO, logging.ERROR):
        logging.addLevelName(level, "")
    logging.addLevelName(logging.WARNING, "warning: ")
    form = f"%(asctime)s {name}: %(levelname)s%(message)s"
    logging.basicConfig(handlers=handlers, format=form, datefmt="%H:%M:%S", level="WARNING", force=True)
    log.setLevel(logging.INFO)
    if family_module:
        allow_import(family_module)
    context.obj = Session(path)
    context.obj.allow_imports()
    if log_path and os.environ.get("RANK", "0") == "0":
        code_files()  # the code as it is now, which may be edited while the job runs
        context.call_on_close(partial(_note, log_path, context.obj))


def _note(log_path: Path, session: Session) -> None:
    """Note beside the log what the job has imported, unless it has only started other processes."""
    if "spider.processes.launch" in sys.modules and "RANK" not in os.environ:
        return
    with suppress(ValueError, OSError):  # The command has reported a bad configuration.
        write_note(log_path, session.results.root)


_REMEDIES = {
    errno.ENOSPC: "no space left on the disk; free some and run the same command again",
    errno.EDQUOT: "disk quota exceeded; free some space and run the same command again",
    errno.EROFS: "the file system is read-only; name a writable folder under `results:`",
    errno.EACCES: "permission denied; name a folder you may write under `results:`",
}


def _status() -> int:
    """Run the command line and return its exit status. An expected error gives one message, a bug raises."""
    try:
        cli(standalone_mode=False)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        log.error("interrupted; run the same command again to continue")
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
    """Run the console script. One of several processes exits without the destructors of torch.

    The destructor of a process group can wait for the interpreter's lock while it holds it, forever, if a
    collective operation is being freed. All other processes would then wait as well.
    """
    set_wait_policy()
    # Reading a truncated memory-mapped file ends the process with SIGBUS. This shows where it was read.
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    grow_segments()
    status = _status()
    if "LOCAL_WORLD_SIZE" in os.environ:
        logging.shutdown()
        os._exit(status)
    sys.exit(status)
