"""Tokenizers: seconds of learning one, megabytes of text written a second, and bytes a token.

    python benchmarks/tokenizer.py [--quick] [--json FILE] [--raw FOLDER]

On the embedded corpus (harvested first, or the parquet files in ``--raw``), one thread. Writing is measured
of documents one by one, as an encode job does it, beside the same documents in bytes, in turn.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"  # before that library is imported

from common import interleaved, parser, report

from spider.config import Dataset, TokenizerConfig
from spider.data.encode import documents
from spider.data.pydocs import write_pydocs
from spider.data.tokenizer import learn
from spider.tokens import BYTES

#: Goals: megabytes a second on one core; seconds to learn 32,768 ids of 20 MB.
SPEED, LEARNING = 3.0, 60.0


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--raw", type=Path)
    asked = options.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    dataset = Dataset.model_validate({"source": {"kind": "pydocs"}, "validation": 0.02})
    if asked.raw is None:
        write_pydocs(0, 2, scratch / "000.parquet")
    raws = sorted((asked.raw or scratch).glob("*.parquet"))[: 1 if asked.quick else None]
    sizes = (300, 512) if asked.quick else (512, 1024, 2048, 4096, 8192, 32_768)
    texts = [text for raw in raws for text in documents(raw, dataset)][: 50 if asked.quick else 2500]
    size = sum(map(len, texts))
    rows, figures = [], {}
    for count in sizes:
        limit = 300_000 if asked.quick else 20_000_000
        config = TokenizerConfig(data="pydocs", vocab_size=count, max_bytes=limit)
        began = time.perf_counter()
        tokens = learn(raws, scratch / "tokenizer.json", "t", config, dataset)
        learning = time.perf_counter() - began
        tokens.encode(b"warm up")
        ids = sum(len(tokens.encode(text)) - 2 for text in texts)
        ways = {
            "ours": lambda tokens=tokens: [tokens.encode(text) for text in texts],
            "bytes": lambda: [BYTES.encode(text) for text in texts],
        }
        _, took = interleaved(ways, 1 if asked.quick else 3)
        speed = {name: size / 1e6 / seconds for name, seconds in took.items()}
        shown = f"{learning:.1f} s", f"{size / ids:.2f}", f"{speed['ours']:.1f}", f"{speed['bytes']:.0f}"
        rows.append([f"{count:,}", *shown])
        figures[str(count)] = {"seconds": learning, "bytes_per_token": size / ids, "mb_per_second": speed}
    columns = ["ids", "learned in", "bytes a token", "MB/s", "MB/s of bytes"]
    libraries = ["tokenizers", "tiktoken"]
    report(f"Tokenizers, {size / 1e6:.1f} MB written", columns, rows, figures, asked, libraries)
    if not asked.quick:
        slowest = min(one["mb_per_second"]["ours"] for one in figures.values())
        print(f"goal {SPEED} MB/s a core: {slowest:.1f}; {LEARNING:.0f} s for 32,768 ids: {learning:.1f}")


if __name__ == "__main__":
    main()
