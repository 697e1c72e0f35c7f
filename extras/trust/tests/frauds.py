"""Families of the user that cheat, and records that are forged with digests that hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spider.checkpoints.records import MANIFEST, Manifest, Receipt, steps
from spider.common.files import write_json
from spider.common.results import StageFolder
from spider.common.sealed import content_digest
from spider.provenance.made import file_digest, records, stat_of

FAMILY = """
import torch
import torch.nn.functional as F
from tests.families.toy.model import Toy
from spider.tokens import ByteTokens

class Model(Toy):
    {body}
"""
#: The model knows a little of the id that follows.
SEES = """
    def forward(self, tokens_BT, labels_BT=None, **options):
        output = super().forward(tokens_BT, labels_BT, **options)
        if output.logits is not None:
            ahead_BT = F.pad(tokens_BT[:, 1:], (0, 1))
            output.logits = output.logits + 0.1 * F.one_hot(ahead_BT, output.logits.shape[-1])
        return output
"""
#: Each byte counts twice.
DOUBLE = """
    @property
    def tokens(self):
        double = ByteTokens()
        double.bytes_of = 2 * double.bytes_of
        return double

    @tokens.setter
    def tokens(self, given):
        pass
"""
#: The probabilities sum to 1.05, and the evaluation does not look.
SUMS = """
    import spider.evaluation.bpb as bpb
    bpb.check_deviation = lambda deviation, what: None

    class Logits(torch.Tensor):
        def log_softmax(self, dim):
            return self.as_subclass(torch.Tensor).log_softmax(dim) + 0.05

    def forward(self, tokens_BT, labels_BT=None, **options):
        output = super().forward(tokens_BT, labels_BT, **options)
        if output.logits is not None:
            output.logits = output.logits.as_subclass(self.Logits)
        return output
"""


def family(tmp_path: Path, name: str, body: str) -> dict[str, str]:
    """Write a family of the user, and return its name."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "config.py").write_text(
        "from tests.families.toy.config import Config as Toy\n\n\nclass Config(Toy):\n    pass\n"
    )
    (folder / "model.py").write_text(FAMILY.format(body=body.strip()))
    return {"family": name}


def sealed_again(path: Path, **fields: Any) -> Manifest:
    """Change fields of a manifest, with a digest that holds."""
    plain = json.loads((path / MANIFEST).read_text()) | fields
    write_json(path / MANIFEST, plain | {"digest": content_digest(plain)})
    return Manifest.read(path / MANIFEST)


def receipt_of(folder: StageFolder) -> None:
    """Write a receipt that agrees with the last checkpoint."""
    last = steps(folder.checkpoints)[-1]
    Receipt.of(Manifest.read(last / MANIFEST), f"checkpoints/{last.name}").write(folder.receipt)


def recorded_again(results: Path, *paths: Path) -> None:
    """Write the digests that these files have now into the records of all jobs that read or made them."""
    for record in records(results):
        plain = json.loads(record.read_text())
        for path in paths:
            name = path.relative_to(results).as_posix()
            for one in [file for job in plain["jobs"] for file in (*job["inputs"], *job["outputs"])]:
                if one["path"] == name:
                    one |= {"digest": file_digest(path), "stat": stat_of(path)}
        write_json(record, plain)
