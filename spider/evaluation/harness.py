"""EleutherAI's lm-evaluation-harness asks a model of any family: its tasks and metrics, our reading.

A context and what continues it are encoded as one text and parted by bytes (`spider.evaluation.tasks`), so
that models of bytes and of tokens are asked the same: its ``acc`` is our count by nats in all, its
``acc_bytes`` ours by nats a byte, its ``bits_per_byte`` that of `spider.evaluation.bpb.score`.

This module imports ``lm_eval``, which only the extra ``spider[harness]`` installs; `SEVEN` tells the tasks
that are asked where none are named.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from spider.evaluation.bpb import score
from spider.evaluation.generate import generate, stream_text
from spider.evaluation.records import HarnessResult
from spider.evaluation.result import Number, Result, Row
from spider.evaluation.tasks import continuations
from spider.model.interface import Model

logging.getLogger("lm_eval").setLevel(logging.ERROR)
datasets.disable_progress_bars()

#: Ids that are written where a task names no limit: the harness's own.
_LONGEST = 1 << 8
#: By which answered examples are drawn: the harness's own.
_SEED = 1234


class HarnessModel(LM):
    """The interface of lm-evaluation-harness to a model. Prompts that do not fit lose their beginning.

    `truncated` counts these prompts.

    Args:
        window: ids that the model reads at once.
        batch: rows that are read at once; texts are written one by one.
        overlap: share of a window that is context only, for texts longer than one.
        reading: ``n_loops`` and ``autocast``, as for `spider.evaluation.bpb.score`.
    """

    def __init__(self, model: Model, *, window: int, batch: int, overlap: float, **reading: Any) -> None:
        super().__init__()
        self.model, self.window, self.batch, self.overlap = model, window, batch, overlap
        self.reading = reading
        self.truncated = 0

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Nats of each continuation, negative, and whether it is what the model would write."""
        return self._continued([(_bytes(context), _bytes(text)) for context, text in _args(requests)])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Of each text by itself, in windows that overlap where it is longer than one."""
        texts = [_bytes(text) for (text,) in _args(requests)]
        ids = [self.model.tokens.encode(text)[:-1] for text in texts]
        short = [i for i, one in enumerate(ids) if len(one) - 1 <= self.window]
        found = dict(zip(short, self._continued([(b"", texts[i]) for i in short]), strict=True))
        return [found[i][0] if i in found else self._rolled(one) for i, one in enumerate(ids)]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """What the model writes after each prompt, up to the first of the task's ``until``."""
        return [self._written(prompt, asked) for prompt, asked in _args(requests)]

    def _continued(self, pairs: list[tuple[bytes, bytes]]) -> list[tuple[float, bool]]:
        if not pairs:
            return []
        read = continuations(self.model, pairs, window=self.window, batch=self.batch, **self.reading)
        self.truncated += read.truncated
        return list(zip((-read.nats_R).tolist(), read.greedy_R.tolist(), strict=True))

    def _rolled(self, ids_N: Any) -> float:
        how = {"seq_len": self.window, "overlap": self.overlap, "batch": self.batch, **self.reading}
        return -score(self.model, ids_N, **how).nats["byte"]

    def _written(self, prompt: str, asked: dict[str, Any]) -> str:
        until = asked.get("until") or []
        ends = [until] if isinstance(until, str) else [end for end in until if end]
        count = int(asked.get("max_gen_toks", _LONGEST))
        room = self.window - min(count, self.window // 2)
        ids_N = self.model.tokens.encode(_bytes(prompt))[:-1]
        if len(ids_N) > room:
            self.truncated += 1
            ids_N = ids_N[-room:]
        draws = bool(asked.get("do_sample", False))
        ids = generate(
            self.model,
            ids_N,
            max_bytes=count * int(self.model.tokens.bytes_of.max()),
            temperature=float(asked.get("temperature", 0.0)) if draws else 0.0,
            top_k=asked.get("top_k") if draws else None,
            top_p=asked.get("top_p") if draws else None,
            seed=0,
            n_loops=self.reading.get("n_loops"),
            context=self.window,
        )
        text = ""
        for piece in stream_text(itertools.islice(ids, count), self.model.tokens):
            text += piece
            if found := [at for end in ends if (at := text.find(end)) >= 0]:
                return text[: min(found)]
        return text


def _args(requests: list[Instance]) -> list[tuple[Any, ...]]:
    return [request.args for request in requests]


def _bytes(text: str) -> bytes:
    """As UTF-8; a lone surrogate, which is no text, as a question mark."""
    return text.encode("utf-8", "replace")


def ask(
    model: HarnessModel,
    names: Sequence[str],
    *,
    include: Path | None = None,
    items: int | None = None,
    shots: int | None = None,
    **about: str,
) -> HarnessResult:
    """Have the harness ask its tasks of these names.

    Args:
        include: a folder with tasks of your own, as the harness describes them; they go before its own.
        items: of each task, the first so many.
        shots: answered examples before each question (default: the task's).
        about: ``label`` and ``weights`` of what is asked, for the result.

    Raises:
        ValueError: a task that there is not, that cannot be read, or whose text is not on this machine.
    """
    manager = TaskManager(include_path=str(include) if include else None, include_defaults=False)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        manager = TaskManager(include_path=str(include) if include else None)  # reads thousands of files
        unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        where = f"the harness has none of that name, nor has {include}" if include else "name --include DIR"
        raise ValueError(f"{unknown[0]}: no such task; {where}")
    loaded = manager.load([task for name in names for task in _load(manager, name)])
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")  # a task that says 0 means it
        task.set_config(key="num_fewshot", value=own or 0 if own == 0 or shots is None else shots)
        task.set_fewshot_seed(seed=_SEED)
    # Not `simple_evaluate`: that has pip list its packages, for seconds, for a report that nobody reads here.
    told = evaluate(model, loaded, limit=items, log_samples=False)
    assert told is not None, "only other processes than the first get nothing"
    names = sorted(told["results"])
    revisions = {name: str(told["versions"][name]) for name in names if told.get("versions", {}).get(name)}
    truncated = (
        f"; {model.truncated:,} prompts did not fit and lost their beginning" if model.truncated else ""
    )
    first = f", of each task the first {items:,} items at most" if items else ""
    note = (
        f"Asked of {about['label']} by lm-evaluation-harness {version('lm_eval')}, in windows of "
        f"{model.window:,} ids{first}{truncated}."
    )
    result = Result(
        title="Standard tasks",
        head="task",
        value="result",
        rows=[row for name in names for row in _rows(told, name)],
        notes=[note],
        details={"truncated": model.truncated, "items": items, "shots": shots},
    )
    return HarnessResult(
        format=HarnessResult.FORMAT,
        versions={"lm_eval": version("lm_eval"), **revisions},
        window=model.window,
        overlap=model.overlap,
        result=result,
        **about,
    )


def _load(manager: TaskManager, name: str) -> list[Any]:
    """A task, a group, or the tasks of a tag, with their questions: for these the network may be needed."""
    try:
        found = manager.load(name)
        return [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        offline = "its text is not on this machine; --online (`online: true` in a run's harness) fetches it"
        away = isinstance(error, ConnectionError) or "offline" in str(error).lower()
        raise ValueError(f"task {name}: {offline if away else 'cannot be read'} ({reason})") from None


def _rows(told: Any, name: str) -> list[Row]:
    """Return a row for each metric of a task: ``acc``, or ``exact_match (strict-match)`` with its filter."""
    rows = []
    asked = told.get("n-samples", {}).get(name, {})
    columns = {
        "items": Number(value=asked.get("effective")),
        "shots": Number(value=told.get("n-shot", {}).get(name)),
    }
    for key, value in told["results"][name].items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        deviation = told["results"][name].get(f"{metric}_stderr,{filtered}")
        label = metric if filtered == "none" else f"{metric} ({filtered})"
        rows.append(
            Row(
                name=f"harness/{name}/{label}",
                label=f"{name}, {label}",
                value=value,
                error=deviation if isinstance(deviation, int | float) else None,
                columns=columns,
                hub_metric=metric,
                hub_dataset=name,
            )
        )
    return rows
