"""A model of any family for transformers: it holds a model of `spider.model.build_model` and calls it.

Weights, their names and logits are the same to the bit. The interface follows transformers:

- ``labels`` are the ids themselves, and the model shifts them. A label of -100 does not count.
- Spider's models do not use padding. Rows with padding at the end are read with it, because no position
  depends on a later one. Any other batch with padding is read row by row, without the padding. Ignore the
  outputs at padding.
- In training mode ``loss`` is the training loss, which a family may add terms to, without logits. In
  evaluation mode there are logits, and ``loss`` is the cross entropy of the labels.

Shapes: B rows, T ids of a row, V ids of the vocabulary, W bytes of a candidate.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from spider.checkpoints.load import Checkpoint, first_three
from spider.checkpoints.records import EXPORTED, NGRAM
from spider.common import files
from spider.common.errors import CheckpointError
from spider.config.imports import allow_import
from spider.config.model import default_family
from spider.data.ngram.lookup import NgramLookup
from spider.data.ngram.store import COPY_AGAIN
from spider.hf.configuration import SpiderHFConfig
from spider.model import build_model
from spider.model.interface import Model, model_tensors
from spider.model.layers import cross_entropy
from spider.model.reading import Streams, begins
from spider.publish.transformers_files import REMOTE, generation, remote
from spider.tokens import BYTES, IGNORED
from spider.tokens.stored import TOKENIZER, read_tokens

#: Options of ``from_pretrained`` that download from the hub.
_HUB_OPTIONS = ("revision", "cache_dir", "token", "local_files_only", "force_download")
#: Alignment of the tensors that torch allocates on a CPU, in bytes.
_ALIGNMENT = 64


class SpiderForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model of transformers; ``model`` is the model of Spider."""

    config_class = SpiderHFConfig
    base_model_prefix = "model"
    _is_stateful = True
    model: Model
    config: SpiderHFConfig
    folder: Path | None = None
    """The folder that the model was loaded from."""

    def __init__(self, config: SpiderHFConfig) -> None:
        super().__init__(config)
        self.model = build_model(config.block)
        self.model.window = config.window
        self.generation_config.update(**generation(config.conversations))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, because `build_model` initializes the weights."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: exported folders hold `REMOTE` instead of the module of this class."""

    # ------------------------------------------------------------------------------------------ reading

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Readers | None = None,
        use_cache: bool | None = None,
        n_loops: int | None = None,
        return_dict: bool | None = None,
        context: int | None = None,
    ) -> Any:
        """Return the logits (B, T, V), or with ``past_key_values`` those of the next id, (B, 1, V).

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 at ids that are not read.
            labels: (B, T), the same ids; -100 where a label does not count.
            past_key_values: the readers of these rows in generation.
            n_loops: how often a looped part runs; `ValueError` for a model without loops.
            context: how many ids the model reads at a time in generation, if more than the window.
        """
        assert self.config.window is not None, "the configuration always sets a window"
        self.model.window = max(self.config.window, context or 0)  # it may have been set after loading
        if past_key_values is not None:
            rows = [ids[mask].tolist() for ids, mask in _rows(input_ids, attention_mask)]
            output = CausalLMOutputWithPast(logits=past_key_values.extend(rows)[:, None])
            output.past_key_values = past_key_values  # type: ignore[assignment]
        else:
            if labels is not None and attention_mask is not None:
                labels = labels.masked_fill(attention_mask == 0, IGNORED)
            output = self._read(input_ids, attention_mask, labels, n_loops or self.config.n_loops)
        return output if return_dict is not False else output.to_tuple()

    def _read(
        self, input_ids: Tensor, mask: Tensor | None, labels: Tensor | None, n_loops: int | None
    ) -> CausalLMOutputWithPast:
        """Read a batch; read each row alone if there is padding before an id."""
        if mask is None or bool((mask[:, 1:] <= mask[:, :-1]).all()):
            return self._read_rows(input_ids, labels, n_loops)
        losses: list[Tensor] = []
        counts: list[Tensor] = []
        logits_BTV = None
        for row, (ids_T, read_T) in enumerate(_rows(input_ids, mask)):
            row_labels = None if labels is None else labels[row, read_T][None]
            output = self._read_rows(ids_T[read_T][None], row_labels, n_loops)
            if row_labels is not None and output.loss is not None:
                losses.append(output.loss)
                counts.append((row_labels[:, 1:] != IGNORED).sum())
            if output.logits is not None:
                if logits_BTV is None:
                    logits_BTV = output.logits.new_zeros(*input_ids.shape, output.logits.shape[-1])
                logits_BTV[row, read_T] = output.logits[0]
        if labels is None:
            return CausalLMOutputWithPast(logits=logits_BTV)
        count_B = torch.stack(counts)
        loss = (torch.stack(losses) * count_B).sum() / count_B.sum().clamp(min=1)
        return CausalLMOutputWithPast(loss, logits_BTV)

    def _read_rows(
        self, input_ids: Tensor, labels: Tensor | None, n_loops: int | None
    ) -> CausalLMOutputWithPast:
        """Read rows without padding, or with padding at the end."""
        candidates_BTW = None
        if self.model.lookup is not None:
            candidates_BTW = torch.stack([candidates(self.model, ids) for ids in input_ids.tolist()])
        next_BT = None
        if labels is not None:
            next_BT = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
        if next_BT is not None and self.training:
            output = self.model(input_ids, next_BT, n_loops=n_loops, candidates_BTW=candidates_BTW)
            return CausalLMOutputWithPast(output.loss)
        logits = self.model(input_ids, n_loops=n_loops, candidates_BTW=candidates_BTW).logits
        loss = None if next_BT is None else cross_entropy(logits, next_BT)[1]
        return CausalLMOutputWithPast(loss, logits)

    # --------------------------------------------------------------------------------------- generation

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `prepare_inputs_for_generation` makes `Readers` instead

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Readers | None = None,
        is_first_iteration: bool = False,
        use_cache: bool | None = None,
        n_loops: int | None = None,
        context: int | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `forward` for one step.

        Raises:
            ValueError: a prompt is longer than the context, which is the window by default.
        """
        context = context or self.config.window
        n_loops = n_loops or self.config.n_loops
        assert context is not None, "the configuration always sets a window"
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if is_first_iteration and (longest := int(mask.sum(1).max())) > context:
            raise ValueError(
                f"the prompt is {longest:,} ids and the model reads {context:,} at most: give only its end "
                "(a tokenizer's truncation_side='left', truncation=True), or "
                f"generate(..., context={2 * longest})"
            )
        if use_cache:
            past_key_values = past_key_values or Readers(self.model, context, n_loops)
        else:
            mask = mask.clone()
            for row, length in enumerate(mask.sum(1).tolist()):
                mask[row, : mask.shape[1] - length + begins(length, context)] = 0
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "past_key_values": past_key_values,
            "n_loops": n_loops,
            "context": context,
        }

    # ------------------------------------------------------------------------------ loading and saving

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model from a folder or the hub, like any model of transformers.

        ``trust_remote_code=True`` allows the import of the family that its ``config.json`` names.

        Raises:
            CheckpointError: an exported folder is damaged or of another architecture, or its family is not
                allowed.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, **kwargs)
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            options = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
            folder = Path(snapshot_download(str(pretrained_model_name_or_path), **options))
        folder /= kwargs.pop("subfolder", "")
        described = files.read_json(folder / EXPORTED)
        if kwargs.get("trust_remote_code"):
            allow_import(str((described.get("model") or {}).get("family", default_family())))
        if "files" in described:
            _ = Checkpoint.at(folder, whole=True).config  # raises if a file is damaged or of another version
        return_info = kwargs.pop("output_loading_info", False)
        # Collect all mismatches, to name them in one error.
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = super().from_pretrained(str(folder), *args, **kwargs)
        model, info = loaded
        wrong = [f"it has no {name.removeprefix('model.')}" for name in info["missing_keys"]]
        wrong += [f"this model has no {name}" for name in info["unexpected_keys"]]
        for name, saved, expected in info["mismatched_keys"]:
            wrong.append(
                f"{name.removeprefix('model.')} has shape {list(saved)}, and {list(expected)} in this model"
            )
        if wrong:
            differing = first_three(sorted(wrong))
            raise CheckpointError(f"{folder}: a checkpoint of another architecture: {differing}")
        model._complete(folder)
        return (model, info) if return_info else model

    @torch.no_grad()
    def _complete(self, folder: Path) -> None:
        """Restore what the weight file does not hold: other buffers, the vocabulary and the n-gram index."""
        # transformers maps the weights from the file, where they lie at any multiple of 8 bytes. A product of
        # such a matrix may differ in the last bit from one of a matrix that torch has allocated.
        for parameter in self.parameters():
            if parameter.data_ptr() % _ALIGNMENT:
                parameter.data = parameter.data.clone()
        tensors = model_tensors(self.model, "model.")
        blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        functional_call(_Reset(self.model), blank, ())
        self.folder = folder
        self.model.tokens = read_tokens(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else BYTES
        if (ngram := self.model.config.ngram) is not None:
            digest = self.config.full_index
            self.model.lookup = NgramLookup.of(folder / NGRAM, digest, ngram, self.model.tokens, COPY_AGAIN)
        if self.dtype.itemsize < 4:
            self._check_dtype()

    def _check_dtype(self) -> None:
        """Run the model on one id; raise `ValueError` if its family does not run in this dtype."""
        ids_11 = torch.tensor([[BYTES.bos]], device=self.device)
        try:
            self.model(ids_11, **self.model.empty_candidates(ids_11))
        except RuntimeError as error:
            raise ValueError(
                f"models of family {self.model.config.family} do not run in {self.dtype} ({error}): leave "
                "dtype out, and call the model under torch.autocast(device, torch.bfloat16)"
            ) from None

    def save_pretrained(  # type: ignore[override]
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ) -> None:
        """Save the model like any model of transformers, with the names of tensors in an exported folder."""
        folder = Path(save_directory)
        if is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / REMOTE).write_bytes(remote())
            self._copy_inputs(folder)
        state = self.state_dict() if state_dict is None else state_dict
        renamed = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        super().save_pretrained(folder, is_main_process, renamed, **kwargs)

    def _copy_inputs(self, folder: Path) -> None:
        """Copy the tokenizer and the n-gram index that the model reads, unless they are in this folder."""
        if self.folder is None or folder.resolve() == self.folder.resolve():
            return
        if (tokenizer := self.folder / TOKENIZER).is_file():
            shutil.copyfile(tokenizer, folder / TOKENIZER)
        if self.model.lookup is not None and not (folder / NGRAM).exists():
            from spider.data.ngram.store import link

            link(self.folder / NGRAM, folder / NGRAM)


class _Reset(nn.Module):
    """Reset the weights of a model in a forward pass, for `functional_call`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> None:
        self.model.reset_parameters()


def _rows(input_ids: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return the ids (T,) of each row and the boolean mask (T,) of those that are read."""
    return list(zip(input_ids, (torch.ones_like(input_ids) if mask is None else mask).bool(), strict=True))


# ---------------------------------------------------------------------------------------- state of generation


def candidates(model: Model, ids: Sequence[int]) -> Tensor:
    """Return the candidates in the model's n-gram index after each id of a text, (N, W) uint8."""
    assert model.lookup is not None, "the model reads an n-gram index"
    candidates_NW = model.lookup.after(np.array(ids), 0, len(ids))
    return torch.from_numpy(candidates_NW).to(next(model.parameters()).device)


class Readers:
    """The state of all rows of a batch.

    Beam search reorders rows. Each row continues with the texts that hold its beginning. Without such texts
    it is read from its beginning.
    """

    def __init__(self, model: Model, context: int, n_loops: int | None) -> None:
        self.model = model
        self.context = context
        self.n_loops = n_loops
        self.texts: list[Streams] = []

    def extend(self, rows: Sequence[list[int]]) -> Tensor:
        """Read the new ids of each row, or all ids of a new row; return the next ids' logits, (B, V)."""
        left = set(range(len(rows)))
        read: list[Streams] = []
        logits: dict[int, Tensor] = {}
        for texts in self.texts:
            start = len(texts.ids[0])
            # The row whose ids are the beginning of each of the batch's rows.
            found = {tuple(ids): row for row, ids in enumerate(texts.ids)}
            chosen = [row for row in sorted(left) if len(rows[row]) > start]
            chosen = [row for row in chosen if tuple(rows[row][:start]) in found]
            chosen = [row for row in chosen if len(rows[row]) == len(rows[chosen[0]])]
            if chosen:
                texts.select([found[tuple(rows[row][:start])] for row in chosen])
                logits |= self._read(texts, rows, chosen)
                read.append(texts)
                left -= set(chosen)
        by_length: dict[int, list[int]] = defaultdict(list)
        for row in sorted(left):
            by_length[len(rows[row])].append(row)
        for chosen in by_length.values():
            texts = Streams(self.model, self.context, self.n_loops, len(chosen))
            logits |= self._read(texts, rows, chosen)
            read.append(texts)
        self.texts = read
        return torch.stack([logits[row] for row in range(len(rows))])

    @staticmethod
    def _read(texts: Streams, rows: Sequence[list[int]], chosen: list[int]) -> dict[int, Tensor]:
        """Read the new ids of these rows and return the logits of the next id of each."""
        start = len(texts.ids[0])
        logits_RNV = texts.read([rows[row][start:] for row in chosen])
        return dict(zip(chosen, logits_RNV[:, -1], strict=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do nothing, because `extend` finds the reader of each row by its ids."""
