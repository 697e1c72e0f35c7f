"""Run EleutherAI's lm-evaluation-harness on a model of any family: its tasks and metrics, our scoring.

A context and its continuation are encoded as one text and separated by bytes (`spider.evaluation.tasks`), so
byte and token models answer the same questions. The harness's ``acc`` is our accuracy by total nats, its
``acc_bytes`` ours by nats per byte, and its ``bits_per_byte`` that of `spider.evaluation.bpb.score`.

This module imports ``lm_eval``, which the extra ``spider-lm[harness]`` installs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from spider.common.errors import reported
from spider.data.chat import message, opening
from spider.evaluation.bpb import score
from spider.evaluation.generate import generate, stream_text
from spider.evaluation.records import HarnessResult
from spider.evaluation.result import Number, Result, Row
from spider.evaluation.tasks import answer_row, score_rows, text_row
from spider.model.interface import Model
from spider.model.reading import Scoring
from spider.tokens.turns import TURN

logging.getLogger("lm_eval").setLevel(logging.ERROR)
datasets.disable_progress_bars()

#: The harness's own defaults: ids written for a task without a limit, and the seed that draws shots.
_MAX_GEN_TOKS = 1 << 8
_SEED = 1234


class HarnessModel(LM):
    """The harness's interface to a model. Prompts that do not fit into the window lose their beginning.

    `truncated` counts these prompts. Texts are written one by one.

    In chat form a prompt is a conversation so far. The harness passes prompts as text, but no text can hold
    the ids of turns, so such a prompt is the JSON of its messages.
    """

    def __init__(self, model: Model, reading: Scoring, *, chat: bool = False) -> None:
        super().__init__()
        self.model = model
        self.reading = reading
        self.chat = chat
        self.truncated = 0

    @property
    def tokenizer_name(self) -> str:
        """Return the name that the harness gives to prompts in chat form."""
        return "spider"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation so far as JSON. A last message of the assistant begins its answer."""
        return json.dumps(chat_history)

    def _opened(self, prompt: str) -> np.ndarray:
        """Return the ids of a prompt."""
        if not self.chat or not prompt:
            return self.model.tokens.encode(_utf8(prompt))[:-1]
        said = json.loads(prompt)
        begun = said.pop()["content"] if said[-1]["role"] == "assistant" else ""
        messages = [message(number, one) for number, one in enumerate(said)]
        ids_N = opening(messages, self.model.tokens, answer=True)
        return np.concatenate([ids_N, self.model.tokens.encode(_utf8(begun))[1:-1]])

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return each continuation's log likelihood, and whether greedy decoding writes it."""
        pairs = _arguments(requests)
        if not pairs:
            return []
        model, window = self.model, self.reading.seq_len
        rows = [
            answer_row(model, self._opened(context), _utf8(text), window)
            if self.chat
            else text_row(model, _utf8(context), _utf8(text), window)
            for context, text in pairs
        ]
        read = score_rows(model, rows, self.reading)
        self.truncated += read.truncated
        return list(zip((-read.nats_R).tolist(), read.greedy_R.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log likelihood of each text, read in overlapping windows."""
        return [
            -score(self.model, self.model.tokens.encode(_utf8(text))[:-1], self.reading).nats["byte"]
            if text
            else 0.0
            for (text,) in _arguments(requests)
        ]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the text that the model writes after each prompt, up to the task's first ``until``."""
        return [self._generate(prompt, options) for prompt, options in _arguments(requests)]

    def _generate(self, prompt: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        ends = [until] if isinstance(until, str) else [end for end in until if end]
        count = int(options.get("max_gen_toks", _MAX_GEN_TOKS))
        window = self.reading.seq_len
        most = window - min(count, window // 2)
        ids_N = self._opened(prompt)
        if len(ids_N) > most:
            self.truncated += 1
            ids_N = ids_N[-most:]
        samples = bool(options.get("do_sample", False))
        ids = generate(
            self.model,
            ids_N,
            max_bytes=count * int(self.model.tokens.bytes_of.max()),
            max_ids=count,
            temperature=float(options.get("temperature", 0.0)) if samples else 0.0,
            top_k=options.get("top_k") if samples else None,
            top_p=options.get("top_p") if samples else None,
            seed=0,
            n_loops=self.reading.n_loops,
            context=window,
            ends=[TURN] if self.chat else (),
        )
        text = ""
        for piece in stream_text(ids, self.model.tokens):
            text += piece
            found = [text.index(end) for end in ends if end in text]
            if found:
                return text[: min(found)]
        return text


def _arguments(requests: list[Instance]) -> list[tuple[Any, ...]]:
    return [request.args for request in requests]


def _utf8(text: str) -> bytes:
    """Encode text as UTF-8. A lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace")


def run_harness(
    model: HarnessModel,
    names: Sequence[str],
    *,
    label: str,
    weights: str,
    include: Path | None = None,
    items: int | None = None,
    shots: int | None = None,
) -> HarnessResult:
    """Run tasks of the harness on a model.

    Args:
        label: Name of the model, for the result.
        weights: Digest of the model's weights, for the result.
        include: Folder with your own tasks in the harness's format. They replace tasks of the same name.
        items: Most items of each task.
        shots: Answered examples before each question (default: the task's).

    Raises:
        ValueError: a task does not exist, cannot be read, or has text that is not on this machine.
    """
    folder = str(include) if include else None
    with reported(f"{include}: the tasks in it cannot be read"):
        manager = TaskManager(include_path=folder, include_defaults=False)
        if any(name not in manager.all_tasks for name in names):
            manager = TaskManager(include_path=folder)  # slow: reads thousands of files
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        where = f"the harness has none of that name, nor has {include}" if include else "name --include DIR"
        raise ValueError(f"{unknown[0]}: no such task; {where}")
    loaded = manager.load([task for name in names for task in _load(manager, name)])
    for task in loaded["tasks"].values():
        own_shots = task.get_config("num_fewshot")
        if own_shots == 0 or shots is None:  # keep a task's explicit 0
            task.set_config(key="num_fewshot", value=own_shots or 0)
        else:
            task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=_SEED)
    # `simple_evaluate` would also list all installed packages by pip, which takes seconds.
    with reported(f"lm-evaluation-harness fails on {', '.join(names)}"):
        outcome = evaluate(
            model,
            loaded,
            limit=items,
            log_samples=False,
            apply_chat_template=model.chat,
            fewshot_as_multiturn=model.chat,
        )
    assert outcome is not None, "only other processes than the first get None"
    tasks = sorted(outcome["results"])
    revisions = outcome.get("versions", {})
    first = f", the first {items:,} items of each task at most" if items else ""
    truncated = (
        f"; {model.truncated:,} prompts did not fit and lost their beginning" if model.truncated else ""
    )
    result = Result(
        title="Standard tasks",
        head="task",
        value="result",
        rows=[row for name in tasks for row in _rows(outcome, name)],
        notes=[
            f"Run on {label} by lm-evaluation-harness {version('lm_eval')}, in windows of "
            f"{model.reading.seq_len:,} ids{', in chat form' if model.chat else ''}{first}{truncated}."
        ],
        details={"truncated": model.truncated, "items": items, "shots": shots, "chat": model.chat},
    )
    return HarnessResult(
        format=HarnessResult.FORMAT,
        label=label,
        weights=weights,
        versions={
            "lm_eval": version("lm_eval"),
            **{name: str(revisions[name]) for name in tasks if revisions.get(name)},
        },
        window=model.reading.seq_len,
        overlap=model.reading.overlap,
        result=result,
    )


def _load(manager: TaskManager, name: str) -> list[Any]:
    """Return a task, a group, or the tasks of a tag, with their questions. This may need the network."""
    try:
        found = manager.load(name)
        return [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())
    except Exception as error:  # of the harness, of datasets, and of the code of a task
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = "cannot be read"
        if isinstance(error, ConnectionError) or "offline" in str(error).lower():
            problem = (
                "its text is not on this machine; --online (`online: true` in a run's harness) fetches it"
            )
        raise ValueError(f"task {name}: {problem} ({reason})") from None


def _rows(outcome: Any, name: str) -> list[Row]:
    """Return a row for each metric of a task: ``acc``, or ``exact_match (strict-match)`` with its filter."""
    rows = []
    metrics = outcome["results"][name]
    columns = {
        "items": Number(value=outcome.get("n-samples", {}).get(name, {}).get("effective")),
        "shots": Number(value=outcome.get("n-shot", {}).get(name)),
    }
    for key, value in metrics.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = metrics.get(f"{metric}_stderr,{filtered}")
        label = metric if filtered == "none" else f"{metric} ({filtered})"
        rows.append(
            Row(
                name=f"harness/{name}/{label}",
                label=f"{name}, {label}",
                value=value,
                error=error if isinstance(error, int | float) else None,
                columns=columns,
                hub_metric=metric,
                hub_dataset=name,
            )
        )
    return rows
