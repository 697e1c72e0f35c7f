"""A model of any family for transformers: it holds ours, made by `spider.model.build_model`, and calls it.

Weights, names and logits are ours to the bit. What differs are the manners of transformers:

- ``labels`` are the ids themselves, shifted here; -100 counts for nothing.
- Our models know of no padding. Rows that end in it are read with it, for no position depends on what comes
  after it; a batch with padding anywhere else is read row by row, each without its own. What stands at
  padding means nothing.
- In training ``loss`` is what the model is trained by, with what its family adds to the cross entropy, and
  there are no logits. In evaluation mode there are, and ``loss`` is the cross entropy of the labels alone.

Shapes: B rows, T ids of a row, V ids of the vocabulary, W bytes of a candidate.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from spider import files
from spider.checkpoints.load import Checkpoint, some
from spider.checkpoints.records import EXPORTED, NGRAM
from spider.checkpoints.transformers_files import REMOTE, generation, remote
from spider.config.imports import allow_import
from spider.config.model import default_family
from spider.errors import CheckpointError
from spider.hf.configuration import SpiderHFConfig
from spider.hf.reading import Readers, begins, proposed
from spider.model import build_model
from spider.model.interface import IGNORED, Model, model_tensors
from spider.model.layers import cross_entropy
from spider.ngram.lookup import NgramLookup
from spider.tokens import BYTES
from spider.tokens.stored import TOKENIZER, read_tokens

_OF_THE_HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")


class SpiderForCausalLM(PreTrainedModel, GenerationMixin):
    """See the module's docstring. ``model`` is ours."""

    config_class = SpiderHFConfig
    base_model_prefix = "model"
    _is_stateful = True
    model: Model
    config: SpiderHFConfig
    folder: Path | None = None
    """From where it was loaded."""

    def __init__(self, config: SpiderHFConfig) -> None:
        super().__init__(config)
        self.model = build_model(config.block)
        self.generation_config.update(**generation(config.conversations))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: `build_model` has set them."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: the code that goes along is `REMOTE`, not the module of this class."""

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
    ) -> Any:
        """Logits (B, T, V), or with ``past_key_values`` those of what follows, (B, 1, V).

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 for what is not to be read.
            labels: (B, T), the same ids; -100 for what does not count.
            past_key_values: what generation has read of these rows.
            n_loops: how often a looped part runs; `ValueError` for a model without one.
        """
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
        if mask is None or bool((mask[:, 1:] <= mask[:, :-1]).all()):
            return self._read_rows(input_ids, labels, n_loops)
        losses: list[Tensor] = []
        counts: list[Tensor] = []
        logits_BTV = None
        for row, (ids, here) in enumerate(_rows(input_ids, mask)):
            own = None if labels is None else labels[row, here][None]
            one = self._read_rows(ids[here][None], own, n_loops)
            if own is not None and one.loss is not None:
                losses.append(one.loss)
                counts.append((own[:, 1:] != IGNORED).sum())
            if one.logits is not None:
                if logits_BTV is None:
                    logits_BTV = one.logits.new_zeros(*input_ids.shape, one.logits.shape[-1])
                logits_BTV[row, here] = one.logits[0]
        if labels is None:
            return CausalLMOutputWithPast(logits=logits_BTV)
        count_B = torch.stack(counts)
        loss = (torch.stack(losses) * count_B).sum() / count_B.sum().clamp(min=1)
        return CausalLMOutputWithPast(loss, logits_BTV)

    def _read_rows(
        self, input_ids: Tensor, labels: Tensor | None, n_loops: int | None
    ) -> CausalLMOutputWithPast:
        """Of rows without padding, or with some behind."""
        given: dict[str, Any] = {"n_loops": n_loops}
        if self.model.lookup is not None:
            given["candidates_BTW"] = torch.stack([proposed(self.model, ids) for ids in input_ids.tolist()])
        if labels is not None:  # what follows each id
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
        if labels is not None and self.training:
            return CausalLMOutputWithPast(self.model(input_ids, labels, **given).loss)
        logits = self.model(input_ids, **given).logits
        return CausalLMOutputWithPast(None if labels is None else cross_entropy(logits, labels)[1], logits)

    # --------------------------------------------------------------------------------------- generation

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `Readers` is made below

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Readers | None = None,
        is_first_iteration: bool = False,
        use_cache: bool | None = None,
        n_loops: int | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """`ValueError` for a prompt that is longer than the window."""
        context, n_loops = self.config.window, n_loops or self.config.n_loops
        assert context is not None, "the configuration sets one"
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if is_first_iteration and (longest := int(mask.sum(1).max())) > context:
            raise ValueError(
                f"the prompt is {longest:,} ids and the model reads {context:,} at most: give its end only "
                "(a tokenizer's truncation_side='left', truncation=True), or set model.config.window"
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
        }

    # ------------------------------------------------------------------------------ loading and saving

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model from a folder or the hub, as every model of transformers.

        ``trust_remote_code=True`` allows the code of the family that its ``config.json`` names.

        Raises:
            CheckpointError: an export has damaged files or those of another architecture, or its family may
                not be imported.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, **kwargs)
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            of_the_hub = {name: kwargs.pop(name) for name in _OF_THE_HUB if name in kwargs}
            folder = Path(snapshot_download(str(pretrained_model_name_or_path), **of_the_hub))
        folder /= kwargs.pop("subfolder", "")
        described = files.read_json(folder / EXPORTED)
        if kwargs.get("trust_remote_code"):
            allow_import(str((described.get("model") or {}).get("family", default_family())))
        if "files" in described:
            _ = Checkpoint.at(folder).config  # refuses what is damaged, or of another version
        informed = kwargs.pop("output_loading_info", False)
        strict = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = super().from_pretrained(str(folder), *args, **kwargs | strict)
        model, info = loaded
        wrong = [f"it has no {name.removeprefix('model.')}" for name in info["missing_keys"]]
        wrong += [f"this model has no {name}" for name in info["unexpected_keys"]]
        for name, there, here in info["mismatched_keys"]:
            wrong.append(
                f"{name.removeprefix('model.')} is {list(there)} there and {list(here)} in this model"
            )
        if wrong:
            raise CheckpointError(f"{folder}: a checkpoint of another architecture: {some(sorted(wrong))}")
        model._complete(folder)
        return (model, info) if informed else model

    @torch.no_grad()
    def _complete(self, folder: Path) -> None:
        """What no file of weights holds: marks, buffers that are not saved, the vocabulary and the index."""
        ours = model_tensors(self.model, "model.")
        blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in ours.items()}
        functional_call(_Reset(self.model), blank, ())
        for name, parameter in self.model.named_parameters():
            vars(parameter).update(vars(blank[f"model.{name}"]))
        self.folder = folder
        self.model.tokens = read_tokens(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else BYTES
        if (ngram := self.model.config.ngram) is not None:
            again = "copy the exported folder whole, or export again"
            digest = self.config.full_index
            self.model.lookup = NgramLookup.of(folder / NGRAM, digest, ngram, self.model.tokens, again)
        if self.dtype.itemsize < 4:
            self._try()

    def _try(self) -> None:
        """Whether this family runs in narrow weights is found by running it."""
        ids_11 = torch.tensor([[BYTES.bos]], device=self.device)
        try:
            self.model(ids_11, **self.model.without_knowledge(ids_11))
        except RuntimeError as error:
            raise ValueError(
                f"models of family {self.model.config.family} do not run in {self.dtype} ({error}): leave "
                "dtype out, and call the model under torch.autocast(device, torch.bfloat16)"
            ) from None

    def save_pretrained(  # type: ignore[override]
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ) -> None:
        """As of every model of transformers; its weights under the names that an export gives them."""
        folder = Path(save_directory)
        if is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / REMOTE).write_bytes(remote())
            self._bring(folder)
        named = self.state_dict() if state_dict is None else state_dict
        own = {name.removeprefix("model."): tensor for name, tensor in named.items()}
        super().save_pretrained(folder, is_main_process, own, **kwargs)

    def _bring(self, folder: Path) -> None:
        """What else it reads, where that lies elsewhere."""
        if self.folder is None or folder.resolve() == self.folder.resolve():
            return
        if (tokenizer := self.folder / TOKENIZER).is_file():
            shutil.copyfile(tokenizer, folder / TOKENIZER)
        if self.model.lookup is not None and not (folder / NGRAM).exists():
            from spider.ngram.store import bring

            bring(self.folder / NGRAM, folder / NGRAM)


class _Reset(nn.Module):
    """Sets a model's weights as a forward pass, for `functional_call`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> None:
        self.model.reset_parameters()


def _rows(input_ids: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Each row's ids, and which of them are to be read."""
    return list(zip(input_ids, (torch.ones_like(input_ids) if mask is None else mask).bool(), strict=True))
