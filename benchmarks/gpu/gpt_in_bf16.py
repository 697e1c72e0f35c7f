"""Compare the GPT in bf16 on a GPU with the same in fp32 on a CPU: attention, logits and text.

    python benchmarks/gpu/gpt_in_bf16.py

Rows:
    varlen   Whether this torch has `varlen_attn` with the parameters that `spider.model.gpt.attend` uses. How
             far its results, forward and backward, are from the mask's in fp32, as a share of the norm.

    logits   Those of gpt-d12 with every weight off its neutral start, over windows and over documents. The
             largest difference is a share of the largest logit.

    greedy   The most likely text after `PROMPTS` pieces of text, by the GPT of trainings.py. Two texts part
             where two ids are nearly equally likely. The gap is fp32's distance between these two ids, as a
             share of its largest logit. What follows cannot be compared.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import questions
import torch
from questions import Row, goal
from texts import corpus
from torch import Tensor
from trainings import GPT, spec_of, undisturbed

from spider.checkpoints.load import Checkpoint
from spider.config import StageSpec
from spider.data.shards import Shards
from spider.evaluation.generate import generate
from spider.model import build_model
from spider.model.gpt.attend import attend, view
from spider.model.interface import Model
from spider.results import StageFolder

#: Rows, ids of a row, most documents of a row, and ids that a layer with a short window sees.
ROWS, LENGTH, MOST, WINDOW = 2, 2048, 74, 1024
PROMPTS, PROMPT, WRITTEN = 20, 64, 256
#: Largest distance of attention (as in the kernel's tests), of logits, and of two ids where texts part.
OFF, LOGITS, GAP = 1e-2, 2e-2, 1e-2


def main(chosen: argparse.Namespace) -> int:
    rehearse = chosen.rehearse
    question = questions.Question("gpt_in_bf16", chosen, goals_of)
    device = torch.device("cpu" if rehearse else "cuda")
    length = 64 if rehearse else LENGTH
    question.measure("varlen", 30, partial(varlen, device, length), describe_varlen)
    size = {"hidden": 64, "layers": 4, "heads": 2, "short_window": 16} if rehearse else {}
    spec = spec_of(GPT, precision="bf16", model=size)
    question.measure("logits", 60, partial(logits, spec, device, length), describe_logits)
    question.measure("greedy", 200, partial(greedy, device, rehearse), describe_greedy)
    return question.end()


def documents(length: int) -> Tensor:
    """Return the documents of two rows: many documents and padding, and a single document."""
    begins = torch.linspace(0, length - length // 16, min(MOST, length // 4) + 1).long()
    packed_T = torch.searchsorted(begins, torch.arange(length), right=True)
    packed_T = packed_T.where(torch.arange(length) < begins[-1], 0)
    return torch.stack([packed_T, torch.ones_like(packed_T)])


def varlen(device: torch.device, length: int) -> dict[str, Any]:
    """Return the parameters of `varlen_attn`, and how far attention in bf16 is from that in fp32."""
    from torch.nn.attention.varlen import varlen_attn  # if this torch lacks it, the row has failed

    takes = list(inspect.signature(varlen_attn).parameters)
    segments_BT, off = documents(length).to(device), {}
    torch.manual_seed(0)
    narrow = [torch.randn(ROWS, length, heads, 128, device=device).bfloat16() for heads in (6, 2, 2)]
    upstream = torch.randn_like(narrow[0])
    short = min(WINDOW, length // 2)
    cases = {"window": (short, None), "documents": (None, segments_BT), "both": (short, segments_BT)}
    for name, (window, segments) in cases.items():
        found, ways = [], []
        for dtype in (torch.bfloat16, torch.float32):
            seen = view((ROWS, length), window, segments, MOST, device, dtype)
            ways.append("mask" if seen.offset_P is None else "offsets")
            q, k, v = (x.to(dtype).requires_grad_() for x in narrow)
            y = attend(q, k, v, seen)
            found.append([y.detach(), *torch.autograd.grad(y, [q, k, v], upstream.to(dtype))])
        each = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True)]
        off[name] = dict(zip(("y", "q", "k", "v"), each, strict=True)) | {"way": ways[0]}
    return {"takes": takes, "off": off}


def logits(spec: StageSpec, device: torch.device, length: int) -> dict[str, Any]:
    """Return how far the device's logits are from the CPU's."""
    torch.manual_seed(0)
    here = build_model(spec.model).eval()
    with torch.no_grad():
        for p in here.parameters():
            if not p.any():  # gates and projections that start at zero would make all logits alike
                p.normal_(0, p.shape[-1] ** -0.5)
    here.most_documents = MOST
    there = copy.deepcopy(here).to(device)
    assert spec.model.vocab_size is not None, "gpt.yaml names a tokenizer"
    ids_BT = torch.randint(0, spec.model.vocab_size, (ROWS, length))
    off = {}
    for name, segments_BT in (("windows", None), ("documents", documents(length))):
        with torch.no_grad():
            exact = here(ids_BT, segments_BT=segments_BT).logits
            moved = None if segments_BT is None else segments_BT.to(device)
            with torch.autocast(device.type, torch.bfloat16):
                narrow = there(ids_BT.to(device), segments_BT=moved).logits.cpu()
        difference = narrow - exact
        off[name] = {
            "most": (difference.abs().max() / exact.abs().max()).item(),
            "norm": (difference.norm() / exact.norm()).item(),
        }
    return {"off": off}


def greedy(device: torch.device, rehearse: bool) -> dict[str, Any]:
    """Generate on the device and on the CPU, and return where the texts part."""
    name = "gpt, fp32" if rehearse else "gpt, bf16"
    written, count = (8, 2) if rehearse else (WRITTEN, PROMPTS)
    stage = StageFolder(undisturbed(name, rehearse))
    at = Checkpoint.newest_good(stage.checkpoints)[0]
    assert at is not None, "it has finished"
    held_out = Shards(corpus()[1], "validation")
    prompts = [
        held_out.vocabulary.raw(held_out.read(i * (held_out.tokens // count), PROMPT)) for i in range(count)
    ]
    here = at.model("cpu")
    exact = write(here, prompts, written, nullcontext())
    narrow = write(at.model(device), prompts, written, torch.autocast(device.type, torch.bfloat16))
    texts = zip(prompts, exact, narrow, strict=True)
    parted = [parting(here, prompt, a, b) for prompt, a, b in texts if a != b]
    return {"texts": count, "ids": written, "parted": parted}


def write(
    model: Model, prompts: list[bytes], written: int, precision: AbstractContextManager[Any]
) -> list[list[int]]:
    """Return the most likely ids after each prompt."""
    with precision:
        return [list(generate(model, prompt, max_bytes=written, temperature=0, seed=0)) for prompt in prompts]


def parting(model: Model, prompt: bytes, exact: list[int], narrow: list[int]) -> dict[str, Any]:
    """Return after how many ids two texts part, and the gap there; EOS follows a text that has ended."""
    ids, eos = model.tokens.encode(prompt)[:-1].tolist(), model.tokens.eos
    a, b = [*exact, eos], [*narrow, eos]
    same = next(i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
    logits_V = model.incremental(len(ids) + same).extend(ids + exact[:same])[-1]
    gap = (logits_V[a[same]] - logits_V[b[same]]) / logits_V.abs().max()
    return {"after": same, "gap": gap.item()}


def describe_varlen(row: Row) -> str:
    misses = [name for name in ("window_size", "enable_gqa") if name not in row["takes"]]
    words = [f"varlen_attn is here{', without ' + ' and '.join(misses) if misses else ''}"]
    for name, of in row["off"].items():
        words.append(f"{name} by {of['way']} off by {_most(of):.1e}")
    return "; ".join(words)


def describe_logits(row: Row) -> str:
    each = (f"{name} off by {of['most']:.1e} (norm {of['norm']:.1e})" for name, of in row["off"].items())
    return "; ".join(each)


def describe_greedy(row: Row) -> str:
    gaps = ", ".join(f"{of['gap']:.1e} after {of['after']}" for of in row["parted"])
    equal = row["texts"] - len(row["parted"])
    return f"{equal} of {row['texts']} texts of {row['ids']} ids equal" + (f"; gaps: {gaps}" if gaps else "")


def _most(of: Mapping[str, Any]) -> float:
    return max(of[name] for name in ("y", "q", "k", "v"))


def goals_of(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    off = list(rows["varlen"]["off"].values()) if "varlen" in rows else []
    by_offsets = sum(of["way"] == "offsets" for of in off) if off else None
    attention = max(map(_most, off), default=None)
    most = max(of["most"] for of in rows["logits"]["off"].values()) if "logits" in rows else None
    gap = max((of["gap"] for of in rows["greedy"]["parted"]), default=0.0) if "greedy" in rows else None
    return [
        goal("windows, documents and both by offsets", by_offsets, lambda x: x == 3),
        goal(f"attention within {OFF:g} of the mask's", attention, lambda x: x <= OFF),
        goal(f"logits within {LOGITS:g} of a CPU's", most, lambda x: x <= LOGITS),
        goal(f"greedy texts equal, or part within {GAP:g} of a tie", gap, lambda x: x <= GAP),
    ]


if __name__ == "__main__":
    sys.exit(main(questions.parser(__doc__).parse_args()))
