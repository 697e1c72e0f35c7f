"""Look at a run in a terminal of 80 columns and in a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time

from tests.forkserver import python

from .conftest import PATIENCE, ROOT

COLUMNS = 80
CODE = re.compile(r"\x1b\[(\??)(\d*)[\d;]*([A-Za-z])|[\r\n]|[^\x1b\r\n]+")
FIRST = "results/runs/small/first/train.json"


class Screen:
    """The text on a terminal, from the control codes that this project's programs send."""

    def __init__(self):
        self.lines = [""]
        self.row = self.column = 0
        self.cursor = True
        self.left = ""

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.lines)

    def feed(self, data):
        whole = self.left + data
        # A read may end within a code.
        whole, self.left = re.fullmatch(r"(.*?)(\x1b\[?[\d;?]*)?", whole, re.S).groups(default="")
        for part in CODE.finditer(whole):
            private, number, code = part.groups()
            if code == "A":
                self.row = max(0, self.row - int(number or 1))
            elif code == "K":
                self.lines[self.row] = ""
            elif code in ("h", "l") and private:
                self.cursor = code == "h"
            elif code:
                assert code == "m", part
            elif part[0] == "\r":
                self.column = 0
            elif part[0] == "\n":
                self.row += 1
                self.lines += [""] * (self.row == len(self.lines))
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part[0] + line[self.column + len(part[0]) :]
                self.column += len(part[0])


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, command, folder):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm"},
            preexec_fn=lambda: os.login_tty(slave),
        )
        os.close(slave)
        self.screen = Screen()

    def states(self):
        """Yield the screen after each change, until the program ends."""
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # The program has closed the terminal.
                break
            self.screen.feed(data.decode(errors="replace"))
            yield self.screen.text
        os.close(self.master)
        self.process.wait(60)


def test_a_terminal_shows_the_running_jobs_their_steps_and_then_the_summary(trained):
    trained.run["stages"].append(
        {"name": "third", "max_steps": 400, "schedule": "constant", "warmup_steps": 0}
    )
    terminal = Terminal([python(), *trained.command()], trained.folder)
    seen = set()
    for text in terminal.states():
        region = text[text.rfind("\n\u2501") + 1 :] if "\n\u2501" in text else ""
        assert all(len(line) <= COLUMNS for line in region.splitlines())
        seen |= set(
            re.findall(
                r"\d+ of 8 jobs done, |train small/third  .*step \d+/400, bpb|at least .* left", region
            )
        )
    assert terminal.process.returncode == 0, terminal.screen.text
    assert {"0 of 8 jobs done, ", "7 of 8 jobs done, "} & seen
    assert any("step" in found for found in seen) and any("left" in found for found in seen), seen
    text, cursor = terminal.screen.text, terminal.screen.cursor
    before, summary = text.split("8 of 8 jobs done in")
    assert cursor and "\u2501" not in text and "step" not in before
    assert len(before.strip().splitlines()) == 2 and before.startswith("Using profile"), before
    assert "datasets.text: 1 file, 31.5 kB, 200 documents" in before
    assert "Bits per byte of" in summary and "All tables" in summary


def test_ctrl_c_leaves_a_usable_terminal_and_a_resumable_training(prepared):
    prepared.run["stages"][0]["max_steps"] = 5000
    terminal = Terminal(prepared.command(FIRST), prepared.folder)
    pressed = False
    for text in terminal.states():
        if not pressed and re.search(r"step \d+/5000", text):
            pressed = True
            os.write(terminal.master, b"\x03")
    text = terminal.screen.text
    assert pressed and terminal.process.returncode == 1, text
    assert terminal.screen.cursor and "\u2501" not in text
    assert "train small/first failed after" in text and "run again to go on" in text
    assert list((prepared.stage("first") / "checkpoints").glob("step-*"))


def test_a_pipe_gets_a_line_for_the_start_and_the_end_of_each_job(prepared):
    printed = prepared(FIRST)
    assert "\x1b" not in printed and "\r" not in printed
    lines = [line for line in printed.splitlines() if not line.startswith("Using profile")]
    lines.remove("datasets.text: 1 file, 31.5 kB, 200 documents")
    time_of_day = r"\d\d:\d\d:\d\d "
    assert lines[0] == "1 job"
    assert re.fullmatch(time_of_day + r"\[0/1\] start train small/first", lines[1])
    assert re.fullmatch(time_of_day + r"\[1/1\] done train small/first, [\d.]+ s", lines[2])
    assert re.fullmatch(r"1 of 1 jobs done in [\d.]+ s", lines[3]) and not lines[4:]


def test_a_failed_job_is_reported_once_with_the_remedy_and_its_log(workflow):
    with open(workflow.folder / "text.jsonl", "a") as file:  # a run looks at the first line before its jobs
        file.write('{"id": "200", "body": "Text"}\n')
    printed = workflow("results/raw/text/000.parquet", fails=True)
    assert printed.count("has no 'text'") == 1 and "set text_column to the one with the text" in printed
    assert printed.count("The whole log: results/logs/download/text/000.log") == 1
    assert "download text/000 failed after" in printed and "0 of 1 jobs done" in printed
    assert "CalledProcessError" not in printed and "WorkflowError" not in printed


def test_a_dry_run_prints_the_same_as_without_the_display(trained):
    profile = trained.folder / "plain"
    profile.mkdir()
    settings = (ROOT / "profiles/default/config.yaml").read_text()
    (profile / "config.yaml").write_text(settings.replace("\nlogger: spider\n", "\n"))

    def messages(*options):
        printed = trained("--dry-run", *options, "--forcerun", "compare", "--", "results/report/summary.json")
        return re.sub(r"\d[\d:.]*|\[\w.*\]|Using .*|Command: .*|ID: .*", "", printed)

    own = messages("--workflow-profile", "none", "--profile", str(profile))
    assert messages() == own and "This was a dry-run" in own


OTHER = """
from snakemake_interface_logger_plugins.base import LogHandlerBase

class LogHandler(LogHandlerBase):
    writes_to_stream = writes_to_file = has_filter = has_formatter = needs_rulegraph = False

    def emit(self, record):
        if getattr(record, "event", None) == "job_finished":
            print("OTHER LOGGER", flush=True)
"""


def test_a_logger_of_the_user_replaces_ours(prepared, monkeypatch):
    plugin = prepared.folder / "plugins/snakemake_logger_plugin_other"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(OTHER)
    printed = prepared(FIRST, "--logger", "other", PYTHONPATH=str(plugin.parent))
    assert "OTHER LOGGER" in printed and "Finished jobid" in printed
    assert "train: step 30/30" in printed, "the job still prints on the terminal"
    assert "start train" not in printed
