"""Shards on disk: their description, a memory-mapped view of a split, and the checks.

A dataset's folder holds ``{split}/{part}.bin`` (uint16 tokens, documents back to back), ``.idx`` (uint64
byte offsets of the BOS tokens), ``.json`` (what the encoder counted) and ``metadata.json``, which the index
job makes from all parts' records and which alone readers trust. The view concatenates a split's shards in the
order of their parts: token i of the split is well defined, and windows do not know of shard borders.

Trade-off: opening checks every size and nothing else, so it costs a millisecond; `verify` reads every byte.
Files are mapped, never loaded: the page cache is the only copy, shared by all ranks of a machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from spider.files import digest, read_json, sha256, write_json
from spider.vocab import BOS, EOS, SPECIAL_IDS, VOCAB_SIZE, decode

FORMAT = 1
DTYPE = np.dtype("<u2")
SPLITS = ("train", "validation")
SETTINGS = ("text_column", "id_column", "validation", "max_document_bytes")
COUNTS = ("tokens", "documents", "bytes")

HEADER_MAGIC = 20240520
HEADER_INTS = 256
"""Length of a headered shard's header in little-endian int32: magic, version 1, number of tokens, zeros."""


# ---------------------------------------------------------------------------------------------- metadata


def build_metadata(
    folder: Path,
    dataset: str,
    *,
    source: dict[str, Any],
    parts: Sequence[str],
    text_column: str = "text",
    id_column: str = "id",
    validation: float = 0.005,
    max_document_bytes: int | None = None,
) -> dict[str, Any]:
    """Describe the encoded ``parts`` in ``folder/metadata.json`` and return it.

    Hashes every shard, as many at a time as there are processors. ``ValueError`` names a part that is
    missing, was encoded under other settings, or whose files have another size than its record says.
    """
    settings = dict(zip(SETTINGS, (text_column, id_column, validation, max_document_bytes), strict=True))
    splits: dict[str, Any] = {}
    for split in SPLITS:
        shards = [_shard_of_part(folder, split, part, settings) for part in parts]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            hashes = pool.map(sha256, [folder / shard["file"] for shard in shards])
        for shard, value in zip(shards, hashes, strict=True):
            shard["sha256"] = value
        splits[split] = {key: sum(shard[key] for shard in shards) for key in COUNTS} | {"shards": shards}
    metadata = {
        "format": FORMAT,
        "dataset": dataset,
        "dtype": DTYPE.str,
        "vocab_size": VOCAB_SIZE,
        "special_ids": SPECIAL_IDS,
        "source": source,
        **settings,
        "splits": splits,
    }
    metadata["digest"] = digest(metadata)
    write_json(folder / "metadata.json", metadata)
    return metadata


def _shard_of_part(folder: Path, split: str, part: str, settings: dict[str, Any]) -> dict[str, Any]:
    path = folder / split / f"{part}.json"
    if not path.exists():
        raise ValueError(f"{path}: part {part} of the {split} split is missing; encode it first")
    record = read_json(path)
    for key, value in settings.items():
        if record.get(key) != value:
            raise ValueError(
                f"{path}: part {part} was encoded with {key} = {record.get(key)!r}, not {value!r}; "
                "encode it again"
            )
    shard = {key: record[key] for key in ("file", "part", *COUNTS)}
    _check_size(folder / shard["file"], shard["tokens"] * DTYPE.itemsize)
    _check_size((folder / shard["file"]).with_suffix(".idx"), shard["documents"] * 8)
    return shard


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path}: no such shard; encode its part again") from None
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise ValueError(f"{path}: {kind}, {size} bytes instead of {expected}; encode its part again")


def load_metadata(folder: Path) -> dict[str, Any]:
    """The checked ``metadata.json`` of a dataset; ``ValueError`` where it is none, or of another format."""
    path = folder / "metadata.json"
    if not path.exists():
        raise ValueError(
            f"{folder}: not an encoded dataset (no metadata.json); run its encode and index jobs"
        )
    metadata = read_json(path)
    if not isinstance(metadata, dict) or not {"format", "dtype", "splits"} <= metadata.keys():
        raise ValueError(f"{path}: not a description of Spider's shards; is this another program's folder?")
    if metadata["format"] != FORMAT:
        raise ValueError(
            f"{path}: format {metadata['format']!r}, this Spider reads format {FORMAT}; "
            "encode the dataset again or use the Spider that wrote it"
        )
    if metadata["dtype"] != DTYPE.str or metadata["vocab_size"] != VOCAB_SIZE:
        raise ValueError(
            f"{path}: tokens are {metadata['dtype']} of {metadata['vocab_size']} ids, "
            f"this Spider reads {DTYPE.str} of {VOCAB_SIZE}; encode the dataset again"
        )
    return metadata


# -------------------------------------------------------------------------------------------------- view


class Shards:
    """A read-only view of one split of an encoded dataset, as one sequence of ``tokens`` uint16 ids.

    ``files`` and ``borders`` say where token i lies: ``files[s]`` holds tokens ``borders[s]`` to
    ``borders[s + 1]``. ``digest`` identifies the content for a resume; ``documents`` is None where unknown.
    Every size is checked against ``metadata.json`` at opening. Safe to use from several threads.
    """

    def __init__(self, folder: Path, split: str) -> None:
        metadata = load_metadata(folder)
        if split not in metadata["splits"]:
            raise ValueError(f"{folder}: no split {split!r} (there are: {', '.join(metadata['splits'])})")
        described = metadata["splits"][split]
        maps = []
        for shard in described["shards"]:
            path = folder / shard["file"]
            _check_size(path, shard["tokens"] * DTYPE.itemsize)
            maps.append((path, _map(path, 0, shard["tokens"])))
        self._view(f"{folder} ({split})", maps, described["documents"], f"{metadata['digest']}/{split}")

    @classmethod
    def from_files(cls, paths: Iterable[Path]) -> Shards:
        """A view of headered shards (see `HEADER_INTS`), as public token datasets come."""
        maps = []
        for path in paths:
            header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
            if len(header) < HEADER_INTS or header[0] != HEADER_MAGIC or header[1] != 1:
                raise ValueError(
                    f"{path}: not a headered shard, which begins with the int32 {HEADER_MAGIC} and 1"
                )
            tokens, start = int(header[2]), HEADER_INTS * header.itemsize
            expected, size = start + tokens * DTYPE.itemsize, path.stat().st_size
            if size != expected:
                raise ValueError(
                    f"{path}: {size} bytes instead of {expected} for the {tokens} tokens that its header "
                    "promises; download it again"
                )
            maps.append((path, _map(path, start, tokens)))
        if not maps:
            raise ValueError("no headered shard was named")
        view = cls.__new__(cls)
        view._view(str(maps[0][0].parent), maps, None, digest([[path.name, len(t)] for path, t in maps]))
        return view

    def _view(
        self, name: str, maps: Sequence[tuple[Path, np.ndarray]], documents: int | None, content: str
    ) -> None:
        filled = [(path, tokens) for path, tokens in maps if len(tokens)]
        self.name = name
        self.files = [path for path, _ in filled]
        self._maps = [tokens for _, tokens in filled]
        self.borders = np.cumsum([0, *map(len, self._maps)])
        self.tokens = int(self.borders[-1])
        self.documents = documents
        self.digest = content

    def locate(self, token: int) -> str:
        """Where a token lies, for messages: its shard, and its place there."""
        s = int(np.searchsorted(self.borders, token, side="right")) - 1
        return f"{self.files[s]}, token {token - int(self.borders[s])}"

    def read(self, start: int, count: int) -> np.ndarray:
        """A copy of tokens ``start`` to ``start + count``, across shard borders: (count,) uint16."""
        return self.gather(np.array([start]), count)[0]

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """A copy of ``length`` tokens from each of ``starts`` (n,): (n, length) uint16."""
        if len(starts) and not (starts.min() >= 0 and starts.max() + length <= self.tokens):
            raise ValueError(
                f"{self.name}: tokens {starts.min()} to {starts.max() + length} asked for, "
                f"but it has {self.tokens}"
            )
        rows = np.empty((len(starts), length), DTYPE)
        if rows.size == 0:
            return rows
        shards = np.searchsorted(self.borders, starts, side="right") - 1
        offsets = starts - self.borders[shards]
        inside = starts + length <= self.borders[shards + 1]
        for s in np.unique(shards[inside]).tolist():
            of = np.flatnonzero(inside & (shards == s))
            # Indexing the view of all windows copies whole rows, and needs no (n, length) indices.
            rows[of] = sliding_window_view(self._maps[s], length)[offsets[of]]
        for i in np.flatnonzero(~inside).tolist():
            s, filled = int(shards[i]), 0
            while filled < length:
                piece = self._maps[s][int(offsets[i]) if filled == 0 else 0 :][: length - filled]
                rows[i, filled : filled + len(piece)] = piece
                filled += len(piece)
                s += 1
        return rows


def _map(path: Path, start: int, tokens: int) -> np.ndarray:
    """A shard's tokens, read-only: a plain array over the mapping, since slicing an `np.memmap` is slow."""
    if tokens == 0:
        return np.empty(0, DTYPE)
    return np.asarray(np.memmap(path, dtype=DTYPE, mode="r", offset=start, shape=(tokens,)))


# ------------------------------------------------------------------------------------------------ checks


def verify(folder: Path, full: bool = True) -> dict[str, int]:
    """Check a dataset's shards against its description.

    Always: sizes, totals and the digest of the description. ``full``: SHA-256 of every shard, every id
    below the vocabulary's size, and a document index that points at exactly the BOS tokens. Returns what was
    checked: shards, documents, tokens, bytes. ``ValueError`` lists every problem with its shard and token.
    """
    metadata = load_metadata(folder)
    problems = []
    content = {key: value for key, value in metadata.items() if key != "digest"}
    if digest(content) != metadata.get("digest"):
        problems.append(f"{folder / 'metadata.json'}: edited since it was written, its digest does not match")
    checked = dict.fromkeys(("shards", *COUNTS), 0)
    for split, described in metadata["splits"].items():
        for key in COUNTS:
            total = sum(shard[key] for shard in described["shards"])
            checked[key] += total
            if described[key] != total:
                problems.append(f"{split}: {described[key]} {key} described, its shards add up to {total}")
        for shard in described["shards"]:
            checked["shards"] += 1
            problems += _shard_problems(folder, shard, full)
    if problems:
        raise ValueError("\n".join([*problems, f"{len(problems)} problems; encode the named parts again"]))
    return checked


def _shard_problems(folder: Path, shard: dict[str, Any], full: bool) -> list[str]:
    path = folder / shard["file"]
    index_path = path.with_suffix(".idx")
    try:
        _check_size(path, shard["tokens"] * DTYPE.itemsize)
        _check_size(index_path, shard["documents"] * 8)
    except ValueError as error:
        return [str(error)]
    problems = []
    if shard["bytes"] != shard["tokens"] - 2 * shard["documents"]:
        problems.append(
            f"{path}: {shard['tokens']} tokens cannot be {shard['documents']} documents of "
            f"{shard['bytes']} bytes"
        )
    if not full:
        return problems
    if sha256(path) != shard["sha256"]:
        problems.append(f"{path}: SHA-256 differs from metadata.json")
    tokens = _map(path, 0, shard["tokens"])
    index = np.fromfile(index_path, dtype="<u8")
    return problems + list(_token_problems(path, tokens)) + list(_index_problems(index_path, tokens, index))


CHUNK = 1 << 22
"""Tokens checked at a time."""


def _token_problems(path: Path, tokens: np.ndarray) -> Iterator[str]:
    for start in range(0, len(tokens), CHUNK):
        bad = np.flatnonzero(tokens[start : start + CHUNK] >= VOCAB_SIZE)
        if len(bad):
            at = start + int(bad[0])
            yield f"{path}: id {tokens[at]} at token {at} is not of the {VOCAB_SIZE} ids"
            return


def _index_problems(path: Path, tokens: np.ndarray, index: np.ndarray) -> Iterator[str]:
    """The index must be exactly the places of BOS, and every document must end with EOS."""
    done = 0
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        found = (np.flatnonzero(chunk == BOS) + start).astype("<u8") * DTYPE.itemsize
        listed = index[done : done + len(found)]
        if len(listed) != len(found) or (listed != found).any():
            differs = np.flatnonzero(listed != found[: len(listed)])
            entry = int(differs[0]) if len(differs) else len(listed)
            yield (
                f"{path}: entry {done + entry} should point at the BOS at token "
                f"{int(found[entry]) // DTYPE.itemsize} of {path.with_suffix('.bin').name}"
            )
            return
        done += len(found)
    if done != len(index):
        yield f"{path}: {len(index)} entries, but the shard holds {done} documents"
        return
    if len(index):
        places = (index // DTYPE.itemsize).astype(np.int64)
        ends = np.append(places[1:], len(tokens)) - 1
        bad = np.flatnonzero(tokens[ends] != EOS)
        if places[0] != 0:
            yield f"{path}: the first document begins at token {places[0]}, not 0"
        elif len(bad):
            yield f"{path}: document {bad[0]} does not end with EOS at token {ends[bad[0]]}"


def inspect(folder: Path, first: int = 400) -> dict[str, Any]:
    """Statistics of a dataset, as plain data.

    By split: documents, tokens, bytes, shards; mean, median and largest document in bytes; the ten most
    frequent bytes with their share and the order-0 entropy in bits a byte, both from at most the first 16 M
    tokens of each shard; ``beginning``, the first tokens of the first shard, decoded.
    """
    metadata = load_metadata(folder)
    report: dict[str, Any] = {"dataset": metadata["dataset"], "digest": metadata["digest"], "splits": {}}
    for split, described in metadata["splits"].items():
        view = Shards(folder, split)
        counts = np.zeros(256, dtype=np.int64)
        lengths = [np.zeros(0, dtype=np.int64)]
        for shard in described["shards"]:
            path = folder / shard["file"]
            sample = _map(path, 0, shard["tokens"])[: 1 << 24]
            counts += np.bincount(sample, minlength=VOCAB_SIZE)[:256]
            index = np.fromfile(path.with_suffix(".idx"), dtype="<u8").astype(np.int64)
            lengths.append(np.diff(np.append(index, shard["tokens"] * DTYPE.itemsize)) // DTYPE.itemsize - 2)
        length = np.concatenate(lengths)
        share = counts / max(1, counts.sum())
        present = share[share > 0]
        report["splits"][split] = {
            **{key: described[key] for key in COUNTS},
            "shards": len(described["shards"]),
            "document_bytes": {
                "mean": float(length.mean()) if len(length) else 0.0,
                "median": float(np.median(length)) if len(length) else 0.0,
                "max": int(length.max()) if len(length) else 0,
            },
            "top_bytes": [
                [int(b), float(share[b])] for b in np.argsort(-share, kind="stable")[:10] if share[b]
            ],
            "entropy_bits": float(-(present * np.log2(present)).sum()),
            "beginning": decode(view.read(0, min(first, view.tokens)).tolist()),
        }
    return report
