"""Score a causal language model of transformers, with its own tokenizer, as a run is scored.

The text, the tasks and the settings are those of a stage; windows have the model's own context. Bits per byte
are the nats of all tokens of the text over ln 2 and its bytes. A document begins with the tokenizer's BOS, or
its EOS (`spider.tokens.foreign`), which predicts the first token.

The score is a code length of the text only if the tokens give its bytes back. Every document is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from spider.common.errors import reported
from spider.common.files import digest, sha256
from spider.common.results import StageFolder
from spider.config import StageSpec
from spider.config.schema import model_files
from spider.evaluation.bpb import Score
from spider.evaluation.evaluate import HeldOut
from spider.evaluation.records import Evaluation, Training
from spider.evaluation.result import Result
from spider.evaluation.tasks import answered
from spider.evaluation.text import Text, validation_stream
from spider.model.interface import Model, ModelOutput
from spider.model.reading import Scoring
from spider.processes.device import available
from spider.tokens import BYTES
from spider.tokens.foreign import ForeignTokens
from spider.tokens.stored import NOT_UTF8

#: Longest window.
WINDOW = 2048
#: Ids of the check for causality.
_CHECKED = 16
#: Bytes of a text that a message shows.
_SHOWN = 20
#: Names of the largest number of ids that a model reads, in configurations of transformers.
_CONTEXTS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


class ForeignModel(Model):
    """A model of transformers with the interface that scoring and tasks need."""

    tokens: ForeignTokens

    def __init__(self, network: nn.Module, tokens: ForeignTokens) -> None:
        super().__init__()
        self.network = network
        self.tokens = tokens

    def _config(self) -> Any:
        """Return the configuration of the part that reads text."""
        network: Any = self.network
        return network.config.get_text_config()

    @property
    def context(self) -> int | None:
        """Return the largest number of ids that the model reads; None without a limit."""
        config = self._config()
        found = max(getattr(config, name, None) or 0 for name in _CONTEXTS)
        for name, module in self.network.named_modules():
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                found -= module.padding_idx + 1  # RoBERTa counts positions from there
        return found if found > 0 else None

    def forward(self, tokens_BT: Tensor, *_: Any, **__: Any) -> ModelOutput:
        return ModelOutput(loss=None, logits=self.network(input_ids=tokens_BT, use_cache=False).logits)

    @classmethod
    def load(cls, folder: Path, device: str) -> ForeignModel:
        """Read a folder, without running code that is in it and without the network.

        Raises:
            ValueError: The folder lacks a part, or its model is not a causal language model.
        """
        if not folder.is_dir():
            remedy = f"Spider downloads no model; `hf download OWNER/NAME --local-dir {folder}` does"
            raise ValueError(f"{folder}: no such folder; {remedy}")
        if not any(next(folder.glob(names), None) for names in ("tokenizer*", "vocab*", "*.model")):
            raise ValueError(
                f"{folder}: has no tokenizer; write it there with save_pretrained of transformers"
            )
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        what = "transformers reads no causal language model there, without code of the folder itself"
        with reported(f"{folder}: {what}"):
            tokenizer = AutoTokenizer.from_pretrained(folder, split_special_tokens=True, **options)
            read: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, **options
            )
        network, loaded = read
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(f"{folder}: a model of another kind, whose weights lack {missing[0]}")
        with reported(str(folder)):
            tokens = ForeignTokens(tokenizer)
        return cls(network.to(device), tokens).eval()

    def check(self, ids_N: np.ndarray, window: int) -> None:
        """Raise `ValueError` if ids are outside of the model, it fails on a window of them, or a prediction
        depends on a later id.
        """
        folder, size = self.network.name_or_path, getattr(self._config(), "vocab_size", None)
        if size is not None and ids_N.max() >= size:
            raise ValueError(f"{folder}: the tokenizer gives id {ids_N.max()}, the model has {size:,} ids")
        ids_1T = torch.from_numpy(ids_N[None, :window]).to(next(self.parameters()).device)
        problem = f"it fails on the {window:,} tokens that its config.json promises; correct them there"
        with reported(f"{folder}: {problem}"), torch.inference_mode():
            self(ids_1T)
        ids_1T = ids_1T[:, :_CHECKED]
        with torch.inference_mode():
            whole, part = self(ids_1T).logits[0, :-1], self(ids_1T[:, :-1]).logits[0]
        if (whole - part).abs().max() > 1e-4 * whole.abs().max():
            raise ValueError(f"{folder}: a prediction depends on later tokens, so the model is not causal")

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        """Return the usual estimate: 6 for each parameter."""
        return 6.0 * self.num_parameters()


def evaluate_foreign(
    name: str, folder: Path, spec: StageSpec, data: Path, output: Path, device: str | None = None
) -> Evaluation:
    """Measure the model in a folder, and write evaluation.json.

    Args:
        name: Name of the model in the comparison.
        folder: Folder of the model.
        spec: The stage whose text, tasks and settings the model shares.
        data: Shards folder of ``spec.evaluation.data``.
        output: Folder of evaluation.json.

    Raises:
        ValueError: As `ForeignModel.load` and `spider.evaluation.bpb.score`; a tokenizer that changes the
            text.
    """
    settings = spec.evaluation
    device = device or available()
    model = ForeignModel.load(folder, device)
    tokens = model.tokens
    own_N, data_digest = validation_stream(data, settings.max_bytes, largest_group=settings.largest_group)
    written = Text.of(own_N, BYTES).documents()
    with reported(f"{folder}: its tokenizer cannot encode the text"):
        encoded = [tokens.encode(document) for document in written]
        documents = [tokens.text(ids) for ids in encoded]
    changed = [number for number, text in enumerate(documents) if text != written[number]]
    if changed:
        raise ValueError(f"{folder}: {_difference(written, documents, changed)}")
    text = Text(np.frombuffer(b"".join(documents), np.uint8), np.cumsum([0, *map(len, documents)]))
    # If BOS is EOS, a document ends where the next one begins. The last one is cut.
    end = -1 if tokens.bos == tokens.eos else None
    tokens_N = np.concatenate([*(ids[:end] for ids in encoded[:-1]), encoded[-1][:-1]])
    window = min(model.context or WINDOW, WINDOW)
    model.check(tokens_N, window)
    # An export of ours names the precision of its score.
    autocast = getattr(model.network.config, "precision", None) == "bf16"
    reading = Scoring(window, settings.overlap, settings.batch, autocast=autocast)
    held_out = HeldOut(spec, data, device, tokens_N, text, data_digest)
    scored, carried = held_out.score(model, reading)
    scored = _of_bytes(scored, len(text))
    carried = carried and _of_bytes(carried, len(text))
    results = {"foreign": _described(folder, model, reading.seq_len)}
    if found := answered(model, reading, settings, converses=False):
        results["tasks"] = found
    evaluation = Evaluation(
        **held_out.measured(model, reading, scored, carried, text.lengths()),
        run=name,
        stage="foreign",
        index=0,
        checkpoint=str(folder),
        averaged=False,
        weights=digest({file.name: sha256(file) for file in model_files(folder)}),
        global_step=0,
        training=Training(steps=0, global_step=0, tokens=0, bytes=0, seconds=0),
        flops_per_token=model.flops_per_token(reading.seq_len),
        results=results,
    )
    output.mkdir(parents=True, exist_ok=True)
    return evaluation.write(StageFolder(output).evaluation)


def _of_bytes(scored: Score, size: int) -> Score:
    """Return a score over the bytes of the text; tokens may have one more for the blank before a document."""
    return replace(scored, counts=scored.counts | {"byte": size})


def _difference(written: Sequence[bytes], documents: Sequence[bytes], changed: Sequence[int]) -> str:
    """Return the message about the first document that a tokenizer changes."""
    parts = NOT_UTF8.split(written[-1].decode("utf-8", "surrogateescape"))
    if changed == [len(written) - 1] and len(parts) == 3 and not parts[2]:
        size = sum(map(len, written)) - len(parts[1])
        problem = "the text ends inside of a character, for which the tokenizer has no bytes"
        return f"{problem}; set evaluation.max_bytes to {size}"
    before, after = written[changed[0]], documents[changed[0]]
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return (
        f"the tokenizer changes {len(changed):,} of {len(written):,} documents. Document {changed[0]} has "
        f"{before[at : at + _SHOWN]!r} at byte {at:,}, and its tokens stand for {after[at : at + _SHOWN]!r}. "
        "Choose a model with a tokenizer of bytes"
    )


def _described(folder: Path, model: ForeignModel, window: int) -> Result:
    """Return what the model is, and how it read the text, for programs and in a sentence."""
    architecture, tokenizer = type(model.network).__name__, type(model.tokens.tokenizer).__name__
    details = {
        "architecture": architecture,
        "tokenizer": tokenizer,
        "tokens": model.tokens.size,
        "context": model.context,
        "window": window,
        "lossless": True,
    }
    note = f"{architecture} of {folder}, in windows of {window:,} tokens. Its tokenizer is lossless."
    return Result(title="Foreign model", notes=[note], details=details)
