"""The embedded corpus, from small sources made here and from what this machine has installed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from spider.data.sources import pydocs as corpus
from spider.data.sources.pydocs import Harvest, SourceFile, schema, write_pydocs

PROSE = (
    "The reader of this text is told what the function does and when it is to be called with a list of names."
)
OTHER = "When a file is not in the folder that was given, it is made there and the caller is told of it."


def source_file(path: Path, text: str, package: str = "some") -> SourceFile:
    path.write_text(text, encoding="utf-8")
    return SourceFile(package, path.name, path)


def test_docstrings_stand_in_order_under_their_names(tmp_path):
    code = f'"""{PROSE}"""\nclass A:\n    def f(self):\n        """{OTHER}"""\nraise SystemExit\n'
    (document,) = Harvest().documents(source_file(tmp_path / "m.py", code))
    assert document == f"m\n\n{PROSE}\n\nA.f\n\n{OTHER}\n"


def test_only_new_english_prose_is_kept(tmp_path):
    paragraphs = [
        PROSE,
        ">>> is_this(a, session) and the reader of it is told to try it in a shell of the kind that is here",
        "Copyright 1999 the owner of this file, who is not to be held to what is said in it by any of you.",
        "0x1f 0x2f 0x3f 0x4f 0x5f 0x6f 0x7f 0x8f 0x9f 0xaf 0xbf 0xcf 0xdf 0xef 0xff 0x0f",
        "Diese Zeilen sind in einer anderen Sprache geschrieben und gehören deshalb nicht in unseren Korpus.",
        OTHER,
        PROSE,
    ]
    code = '"""' + "\n\n".join(paragraphs) + '"""\n'
    harvest = Harvest()
    (document,) = harvest.documents(source_file(tmp_path / "m.py", code))
    assert document == f"m\n\n{PROSE}\n\n{OTHER}\n"
    assert harvest.documents(source_file(tmp_path / "n.py", code)) == []


def test_readme_loses_badges_and_changelog(tmp_path):
    badge = "[![ci](https://img.shields.io/x)](y)"
    text = f"# Some\n\n{badge}\n\n{PROSE}\n\n{OTHER}\n\n## Changelog\n\nAnd the rest of it is {PROSE}\n"
    (document,) = Harvest().documents(source_file(tmp_path / "README.md", text))
    assert document == f"some\n\n# Some\n\n{PROSE}\n\n{OTHER}\n"


@pytest.fixture(scope="module")
def harvested(tmp_path_factory) -> Path:
    """One small piece of the real corpus, written by a process of its own, twice."""
    folder = tmp_path_factory.mktemp("pydocs")
    for name, seed in (("a", "1"), ("b", "2")):
        code = (
            "import sys; from pathlib import Path; from spider.data.sources.pydocs import write_pydocs;"
            f"write_pydocs(60, 100, Path({str(folder / name)!r}) / '000.parquet');"
            "print([m for m in ('torch', 'sympy', 'mlflow') if m in sys.modules])"
        )
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "[]", "harvesting imports nothing that it reads"
    return folder


def test_real_harvest_is_reproducible_and_has_fineweb_columns(harvested):
    assert (harvested / "a/000.parquet").read_bytes() == (harvested / "b/000.parquet").read_bytes()
    table = pq.read_table(harvested / "a/000.parquet")
    assert table.schema.remove_metadata() == schema()
    rows = table.to_pylist()
    assert len(rows) > 3 and len({r["id"] for r in rows}) == len(rows)
    assert len({r["text"] for r in rows}) == len(rows)
    assert all(r["token_count"] == len(r["text"].encode()) >= corpus.MIN_DOCUMENT for r in rows)
    constant = {"dump": "pydocs", "language": "en", "language_score": 1.0, "score": 0.0, "int_score": 0}
    assert all({name: row[name] for name in constant} == constant for row in rows)
    record = json.loads(table.schema.metadata[b"spider.pydocs"])
    assert record["piece"] == "60/100" and {r["url"].split("==")[0][7:] for r in rows} <= set(
        record["packages"]
    )


def write_distribution(folder: Path, name: str, version: str, size: int = 9) -> None:
    """Write an installed package ``name`` with one documented module below ``folder``."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{name}.py,sha256=x{name},{size}\n")
    (folder / f"{name}.py").write_text(f'"""{PROSE}"""\n')


def test_the_pieces_do_not_depend_on_the_sizes_of_the_installed_files(tmp_path, monkeypatch):
    """A build of torch for GPUs has other files than one for CPUs, and the default text is the same."""
    listed = tmp_path / "pydocs.txt"
    listed.write_text("python==3 0\nalpha==1.0 4\nbeta==1.0 3\ngamma==1.0 2\ndelta==1.0 1\n")
    monkeypatch.setattr(corpus, "PACKAGES", listed)
    for build, sizes in (("cpu", (4, 3, 2, 1)), ("gpu", (1, 2, 3, 9))):
        for name, size in zip(("alpha", "beta", "gamma", "delta"), sizes, strict=True):
            write_distribution(tmp_path / build, name, "1.0", size)
            (tmp_path / build / f"{name}.py").write_text(f'"""{PROSE} {PROSE} {PROSE}"""\n')
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / build))
            write_pydocs(1, 2, tmp_path / f"{build}.parquet")
    urls = pq.read_table(tmp_path / "cpu.parquet")["url"].to_pylist()
    assert urls == ["pydocs:beta==1.0/beta.py#0"], "gamma repeats the text of beta"
    assert pq.read_table(tmp_path / "gpu.parquet")["url"].to_pylist() == urls


def test_only_listed_packages_enter_and_differences_are_named(tmp_path, monkeypatch, caplog):
    for name, version in (("wanted", "1.0+cpu"), ("moved", "2.1"), ("besides", "3.0")):
        write_distribution(tmp_path / "site", name, version)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    listed = tmp_path / "pydocs.txt"
    listed.write_text("# a comment\npython==3.1 9\nwanted==1.0 3\nmoved==2.0 2\nabsent==4.0 1\n")
    monkeypatch.setattr(corpus, "PACKAGES", listed)
    found = corpus.installed_packages()
    assert list(found) == ["moved", "wanted"], "what is installed beside the listed packages never enters"
    (record,) = caplog.records
    message = record.getMessage()
    assert "absent is missing (listed: 4.0)" in message
    assert "moved 2.1 (listed: 2.0)" in message
    assert f"python {platform.python_version()} (listed: 3.1)" in message
    assert "wanted" not in message and "besides" not in message


def test_the_list_and_the_constraints_name_the_same_versions():
    """An upgraded constraint changes the default text, so the list has to be changed on purpose."""
    pinned = {}
    for line in (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.partition(";")[0].split("==")
            pinned[canonicalize_name(name)] = version.strip()
    listed = {name: package.version for name, package in corpus.listed_packages().items()}
    listed.pop("python")
    assert listed == {name: pinned.get(name) for name in listed}


def test_a_user_has_all_packages_of_the_list_without_those_of_developers():
    """Without one, the default run has another text than the one that is quoted."""
    root = Path(__file__).parents[3]
    files = [root / "pyproject.toml", *root.glob("extras/*/pyproject.toml")]
    waiting = [one for file in files for one in tomllib.loads(file.read_text())["project"]["dependencies"]]
    found = set()
    while waiting:
        one = Requirement(waiting.pop())
        for extra in one.extras or {""}:
            if (one.marker is None or one.marker.evaluate({"extra": ""})) and (one.name, extra) not in found:
                found.add((one.name, extra))
                try:
                    needed = map(Requirement, requires(one.name) or [])
                except PackageNotFoundError:
                    continue
                same = (r for r in needed if r.marker is None or r.marker.evaluate({"extra": extra}))
                for r in same:
                    r.marker = None
                    waiting.append(str(r))
    installed = {canonicalize_name(name) for name, _ in found}
    assert corpus.listed_packages().keys() - installed == {"python"}
