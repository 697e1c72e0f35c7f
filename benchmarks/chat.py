"""Conversations: what each stage of a chat run makes of answers, and whether its answers end by themselves.

    make run CONFIG=presets/chat-cpu.yaml
    python benchmarks/chat.py [RUN_FOLDER] [--quick] [--json FILE]

The first held-out questions are put to the last stage's model, which answers at temperature 0.7 in at most
300 bytes; an answer has ended by itself if the model closed its turn. Of each stage stand its bits per byte
of what an assistant says.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from common import parser, report

from spider import load_model
from spider.data.shards import Shards
from spider.evaluation.artifact import Evaluation
from spider.evaluation.generate import generate, stream_text
from spider.results import Results, StageFolder
from spider.tokens import Tokens
from spider.tokens.turns import ASSISTANT, TURN

LIMIT = 300
#: Goals: share of answers that end by themselves; bits per byte of answers won from first to last stage.
ENDED, WON = 0.9, 0.5


def questions(shards: Shards, tokens: Tokens, count: int) -> list[np.ndarray]:
    """Conversations up to where their first answer begins."""
    ids_N = shards.read(0, min(shards.tokens, 200 * count))
    documents = np.split(ids_N, np.flatnonzero(ids_N == tokens.bos)[1:])
    asked = [ids[: int(np.argmax(ids == ASSISTANT)) + 1] for ids in documents if (ids == ASSISTANT).any()]
    return asked[:count]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("run", type=Path, nargs="?", default=Path("results/chat/runs/chat"))
    asked = options.parse_args()
    measured = [Evaluation.read(path) for path in asked.run.glob("*/evaluation.json")]
    measured.sort(key=lambda one: one.index)
    rows = [[one.stage, f"{one.bpb:.3f}", f"{one.bpb_assistant or 0:.3f}", ""] for one in measured]
    last = measured[-1]
    model, _ = load_model(StageFolder(asked.run / last.stage).path)
    shards = Shards(Results(asked.run.parents[1]).shards(last.data), "validation")
    ended, shown = 0, []
    prompts = questions(shards, model.tokens, 5 if asked.quick else 100)
    for number, ids in enumerate(prompts):
        written = list(
            generate(
                model, ids, max_bytes=LIMIT, temperature=0.7, seed=number, context=last.seq_len, ends=[TURN]
            )
        )
        size = int(model.tokens.bytes_of[written].sum()) if written else 0
        closed = size + int(model.tokens.bytes_of.max()) <= LIMIT
        ended += closed
        shown.append((model.tokens.decode(ids), "".join(stream_text(written, model.tokens))))
    share = ended / len(prompts)
    rows.append([f"{len(prompts)} questions put to {last.stage}", "", "", f"{share:.0%} end by themselves"])
    won = (measured[0].bpb_assistant or 0) - (last.bpb_assistant or 0)
    figures = {"ended": share, "won": won, "stages": {one.stage: one.bpb_assistant for one in measured}}
    report("Conversations", ["stage", "bits per byte", "of answers", ""], rows, figures, asked, ["torch"])
    for question, answer in shown[:5]:
        print(f"  {question}\n    {answer}")
    if not asked.quick:
        print(f"goals: {ENDED:.0%} end by themselves: {share:.0%}; {WON} bits won of answers: {won:.2f}")


if __name__ == "__main__":
    main()
