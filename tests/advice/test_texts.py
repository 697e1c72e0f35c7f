"""Advice about a person's own files: each is refused, corrected as the message says, and imported."""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from spider.config import ConfigError, TokenizerConfig
from spider.data.documents import learned_texts
from spider.data.encode import encode_part
from spider.data.sources.local import LocalSource, all_texts, files_of, import_local
from spider.data.sources.pydocs import Harvest, installed_files
from spider.data.take import Section, take_files
from spider.data.tokenizer import learn
from tests.unit.data.test_pydocs import PROSE, write_distribution
from tests.unit.small_datasets import dataset

from .followed import check_said, refused

LINES = b'{"text": "one two three", "url": "a"}\n'


def parquet(names: list[str] | None = None, **columns: Any) -> bytes:
    columns = columns or {"text": ["one two three"] * 2000, "id": [str(i) for i in range(2000)]}
    table = pa.table(columns) if names is None else pa.table([["one"]] * len(names), names=names)
    pq.write_table(table, made := io.BytesIO())
    return made.getvalue()


def arrow() -> bytes:
    feather.write_feather(
        pa.table({"text": ["one two three"] * 100}), made := io.BytesIO(), compression="lz4"
    )
    return made.getvalue()


BY_URL = {"split_by": {"column": "url"}}
OTHER = {"split_by": {"column": "host"}}
#: A phrase, the file that provokes it, and the settings; then the file and the settings after each remedy.
# fmt: off
ADVICE: dict[str, list[tuple[Any, ...]]] = {
    "data/sources/local.py": [
        ("no such file or folder; check datasets.*.source.files", ("b.jsonl", None), {},
         (("a.jsonl", LINES), {})),
        ("unknown kind of file; give {}", ("a.docx", b'one'), {}, (("a.txt", b'one'), {})),
        ("{}: {}; copy it again", ("a.jsonl.gz", gzip.compress(LINES * 9)[:-20]), {},
         (("a.jsonl.gz", gzip.compress(LINES * 9)), {})),
        ("{}: {} after row {}; copy it again", ("a.arrow", arrow()[:-50]), {}, (("a.arrow", arrow()), {})),
        ("{}: is UTF-16 or UTF-32; export it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
         ("a.jsonl", LINES.decode().encode("utf-16")), {}, (("a.jsonl", LINES), {})),
        ("{}, {}; correct the file{}", ("a.jsonl", LINES + b'{'), {}, (("a.jsonl", LINES), {})),
        ("{}: a text has no column {}; {}, or leave {} out", ("a.txt", b'one'), BY_URL,
         (("a.txt", b'one'), {})),
        ("set {} to {}, its path", ("a.txt", b'one'), BY_URL,
         (("a.txt", b'one'), {"split_by": {"column": "id"}})),
        ("no line has {} (keys: {}); set {} to one of them, or leave {} out", ("a.jsonl", LINES), OTHER,
         (("a.jsonl", LINES), BY_URL), (("a.jsonl", LINES), {})),
        ("{}, {}: has no {} (keys: {}); set text_column to the one with the text",
         ("a.jsonl", b'{"body": "one"}'), {}, (("a.jsonl", b'{"body": "one"}'), {"text_column": "body"})),
    ],
    "data/documents.py": [
        ("set {} to one of them", ("a.parquet", parquet(body=["one"])), {},
         (("a.parquet", parquet(body=["one"])), {"text_column": "body"})),
        (", or leave {} out", ("a.parquet", parquet(text=["one"])), BY_URL,
         (("a.parquet", parquet(text=["one"])), {})),
        ("set {} to another, or write a column of text into the file",
         ("a.parquet", parquet(text=[{"body": "one"}], body=["one"])), {},
         (("a.parquet", parquet(text=[{"body": "one"}], body=["one"])), {"text_column": "body"}),
         (("a.parquet", parquet(text=["one"])), {})),
        ("give each but one another name", ("a.parquet", parquet(names=["text", "text", "id"])), {},
         (("a.parquet", parquet(names=["text", "title", "id"])), {})),
        ("copy {} again", ("a.parquet", parquet()[:200] + b'damaged' * 9 + parquet()[263:]), {},
         (("a.parquet", parquet()), {})),
    ],
}
# fmt: on


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(name: str, content: bytes | None, settings: dict[str, Any]) -> None:
    """Import a file and encode it."""
    for old in Path().glob("*"):
        old.unlink()
    if content is not None:
        Path(name).write_bytes(content)
    import_local(Path(name), Path("raw.parquet"), dataset(**settings))
    list(learned_texts(Path("raw.parquet"), dataset(**settings)))


@pytest.mark.parametrize(
    ("phrase", "broken", "settings", "remedies"),
    [
        pytest.param(phrase, broken, settings, remedies, id=f"{phrase[:40]}")
        for rows in ADVICE.values()
        for phrase, broken, settings, *remedies in rows
    ],
)
def test_a_corrected_file_or_setting_is_read(phrase, broken, settings, remedies):
    with pytest.raises(ValueError) as caught:
        read(*broken, settings)
    check_said(str(caught.value), phrase)
    for corrected, after in remedies:
        read(*corrected, after)


def test_an_incomplete_parquet_is_copied_again_and_a_path_is_corrected():
    source = LocalSource(kind="local", files=["a.parquet"])
    with refused("config/data.py", "no such file; correct its path in the block source"):
        source.probe(source.items(), dataset())
    Path("a.parquet").write_bytes(parquet()[:-9])
    with refused("data/sources/local.py", "not a complete parquet file ({}); copy it again"):
        source.probe(source.items(), dataset())
    Path("a.parquet").write_bytes(parquet())
    assert source.probe(source.items(), dataset())


def test_a_damaged_download_is_deleted():
    Path("raw.parquet").write_bytes(parquet()[:200] + b"damaged" * 9 + parquet()[263:])
    with refused("data/documents.py", "delete it and download it again"):
        list(learned_texts(Path("raw.parquet"), dataset()))
    Path("raw.parquet").unlink()
    Path("raw.parquet").write_bytes(parquet())
    list(learned_texts(Path("raw.parquet"), dataset()))


def test_data_are_kept_outside_of_the_results_folder():
    Path("raw.jsonl").write_bytes(LINES)
    with refused("data/sources/local.py", "is also the output; keep your data outside the results folder"):
        import_local(Path("raw.jsonl"), Path("raw.jsonl"), dataset())
    Path("mine").mkdir()
    import_local(Path("raw.jsonl").rename("mine/raw.jsonl"), Path("raw.parquet"), dataset())


def test_the_files_of_a_folder_are_named():
    folder = Path("mine")
    folder.mkdir()
    source = LocalSource(kind="local", files=["mine"])
    with refused("data/listing.py", "{} holds no file of a known kind; give {}", error=ConfigError):
        source.items()
    with refused("data/sources/local.py", "{}: holds no file of a known kind; give {}"):
        files_of(folder)
    (folder / "a.txt").write_text("one two three")
    assert source.items() and files_of(folder)
    (folder / "b.jsonl").write_bytes(LINES)
    source = LocalSource(kind="local", files=["mine"])  # A process lists files once.
    with refused("data/listing.py", "name the files to take, as in {}/*.jsonl", error=ConfigError):
        source.items()
    assert LocalSource(kind="local", files=["mine/*.jsonl"]).items() == ["mine/b.jsonl"]


def test_a_protected_file_without_text_is_corrected():
    Path("a.jsonl").write_bytes(LINES)
    with refused("data/sources/local.py", "holds no text of {} words or more; correct it, or leave it out"):
        list(all_texts(Path("a.jsonl"), 8))
    Path("a.jsonl").write_bytes(LINES.replace(b"one", b"one two three four five six"))
    assert list(all_texts(Path("a.jsonl"), 8))


def test_less_text_is_taken_or_the_file_copied_again():
    whole = parquet()
    Path("a.parquet").write_bytes(whole)

    def take(last: int) -> None:
        section = Section(0, last, of_rows=False)
        take_files({"a": Path("a.parquet")}, section, Path("o.parquet"), dataset())

    with refused("data/take.py", "are more than there are; {}. Take less, or leave take out"):
        take(10**9)
    Path("a.parquet").write_bytes(whole[:100] + b"damaged" + whole[107:])
    with refused("data/take.py", "{}: {}; copy the file again"):
        take(1)
    Path("a.parquet").write_bytes(whole)
    take(1)


def test_a_tokenizer_is_learned_with_less_held_out_or_a_smaller_vocabulary():
    Path("a.parquet").write_bytes(parquet())

    def learned(size: int, **settings: Any) -> None:
        config = TokenizerConfig(data="text", vocab_size=size)
        learn([Path("a.parquet")], Path("tokenizer.json"), "t", config, dataset(**settings))

    with refused("data/tokenizer.py", "lower `validation`, or give more text"):
        learned(275, validation=0.999999)
    with refused("data/tokenizer.py", "but {} bytes have only {}; set it to {}, or give more text") as said:
        learned(300)
    learned(int(str(said.value).partition("set it to ")[2].partition(",")[0]))


def test_shards_are_written_when_there_is_space(tmp_path):
    Path("a.parquet").write_bytes(parquet())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with refused(
            "data/encode.py",
            "{}: cannot write the shards of part {} ({}); {} and run again, no incomplete shard was kept",
            "free space (a shard is twice the size of its text)",
        ):
            encode_part(Path("a.parquet"), tmp_path / "shards", "000", dataset())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    encode_part(Path("a.parquet"), tmp_path / "shards", "000", dataset())


def test_a_missing_raw_text_is_downloaded_first():
    with refused("data/documents.py", "download it first (with temp: true it is deleted after encoding)"):
        encode_part(Path("a.parquet"), Path("shards"), "000", dataset())
    Path("mine.jsonl").write_bytes(LINES)
    import_local(Path("mine.jsonl"), Path("a.parquet"), dataset())
    encode_part(Path("a.parquet"), Path("shards"), "000", dataset())


def test_a_large_array_is_written_as_lines(monkeypatch):
    monkeypatch.setattr("spider.data.sources.local.MOST_ARRAY", 100)
    rows = [{"text": "one two three", "id": str(i)} for i in range(9)]
    Path("a.json").write_text(json.dumps(rows))
    with refused("data/sources/local.py", "write one object a line, as `jq -c '.[]'` does"):
        import_local(Path("a.json"), Path("a.parquet"), dataset())
    Path("a.json").write_text("\n".join(map(json.dumps, rows)))
    import_local(Path("a.json"), Path("a.parquet"), dataset())


def test_a_package_whose_files_are_missing_is_reinstalled():
    def install() -> None:
        write_distribution(Path("site"), "one", "1.0")
        Path("site/one.py").write_text(f'"""{PROSE} {PROSE} {PROSE}"""\n')

    install()
    (installed,) = importlib.metadata.distributions(path=["site"])
    (file,) = (file for file in installed_files({"one": installed}) if file.path.name == "one.py")
    shutil.rmtree("site")
    with refused("data/sources/pydocs.py", "cannot read {}: {}; reinstall {}"):
        Harvest().documents(file)
    install()
    assert Harvest().documents(file)
