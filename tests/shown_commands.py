"""Find the examples that the pages show, and the command lines in the comments of configurations."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The log is history; all other pages describe the tree as it is.
_NAMES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "extras/*/README.md")
PAGES = [path for name in _NAMES for path in sorted(ROOT.glob(name)) if path.name != "LOG.md"]
CONFIGURATIONS = [ROOT / "config.yaml", *sorted(ROOT.glob("presets/*.yaml"))]
PROFILES = sorted(ROOT.glob("profiles/*/config.yaml"))

_COMMAND = re.compile(r"((?:[A-Z_]+=\S+ )*(?:make run|snakemake|spider)(?: .*)?)$")
#: A word in capitals is a name that the reader fills in, and dots stand for omitted text.
_OPEN = re.compile(r"\.\.\.|…|(?<![\w=-])[A-Z]{3,}(?![\w=])|\*")


def shown(program: str) -> dict[str, str]:
    """Return the complete command lines of a program (``make run``, ``snakemake``, ``spider``).

    Keys also contain the page, for the names of tests.
    """
    found: dict[str, str] = {}
    for path in (*PAGES, *CONFIGURATIONS, *PROFILES):
        for line in _lines(path):
            command = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
            if command.split()[: len(program.split())] == program.split() and not _OPEN.search(command):
                found.setdefault(line, path.name)
    return {f"{page}: {line}": line for line, page in found.items()}


def examples(language: str) -> dict[str, str]:
    """Return the code blocks of a language by page and number."""
    found: dict[str, str] = {}
    for path in PAGES:
        blocks = re.findall(rf"^ *```{language}\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.M | re.S)
        for number, block in enumerate(blocks, 1):
            found[f"{path.relative_to(ROOT)}: {number}"] = textwrap.dedent(block)
    return found


def words(line: str) -> list[str]:
    """Return the words of a command line, without its comment."""
    return shlex.split(line, comments=True)


def _lines(path: Path) -> Iterator[str]:
    """Yield the command lines in the code of a page, or in the comments of a configuration.

    A block of the language ``text`` is output.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        comments = re.findall(r"#(.*)", text)
        pieces = [piece for one in comments for piece in re.split(r"\s{2,}", one)]
    else:
        found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
        blocks = [block for language, block in found if language != "text"]
        rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
        pieces = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        pieces += re.findall(r"^ {4}(\S.*)$", rest, re.M)
        pieces += re.findall(r"`([^`\n]+)`", rest)
    for piece in pieces:
        line = re.split(r"\s+#", piece.strip())[0]
        if match := _COMMAND.match(line):
            yield match[1].strip()
