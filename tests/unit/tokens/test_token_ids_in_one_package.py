"""Only `spider.tokens`, and families that work on bytes, contain token ids as numbers."""

import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[3]
IDS = {"256", "257", "258", "272"}
#: Numbers that are not token ids: integers of a file's header, rows of a kernel's block.
OTHER = {("spider/data/shards.py", "HEADER_INTS = 256"), ("kernels/normalize_weight.py", "ROWS = 256")}


def sources():
    families = ROOT / "spider/model/spider"
    for folder in ("spider", "rules", "kernels"):
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.is_relative_to(ROOT / "spider/tokens") or path.is_relative_to(families)
            if path.suffix in (".py", ".smk") and not inside:
                yield path


def test_no_other_file_contains_a_token_id():
    wrong = []
    for path in sources():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        wrong += [name] * ("VOCAB_SIZE" in text or "spider.vocab" in text)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = token.line.strip()
            if token.type == tokenize.NUMBER and token.string in IDS and (name, line) not in OTHER:
                wrong.append(f"{name}: {line}")
    assert not wrong


def test_no_other_file_imports_a_family():
    assert not [path for path in sources() if "spider.model.spider" in path.read_text()]
