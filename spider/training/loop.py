"""The training loop: the steps of one stage, resumable after any step, with bit-equal results.

The result of a step depends only on the state before it and on (seed, stage, step). The global generator is
seeded at every step, the learning rate is a function of the step, and the batch a function of the loader's
position. So a checkpoint needs no generator state. A run that is killed anywhere and resumed equals an
uninterrupted one on the same machine with the same number of threads (on a GPU: `make_deterministic`).
``max_hours`` alone lets a clock change the result: it ends the stage. (``ckpt_minutes`` only times saves.)

Several processes (`spider.processes.world`) share the windows of a step. A step has the same windows in the
same order for any number of processes; ``micro_batch`` times ``grad_accum`` is their number. With
``grad_accum`` a multiple of the processes they are also cut into the same micro-batches, so only the order of
sums differs. Another cut draws other noise, and changes what is computed for a micro-batch as a whole: the
limit on patches (with static shapes) and the balance of experts.

The host does not wait for a GPU in a step, so the device does not idle. Whether the gradient is finite is
decided on the device, which skips the update if not. The host reads it a step later, or before a save.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.metrics import MetricsLog
from spider.checkpoints.records import Warmup, parts_done, step_of, steps
from spider.checkpoints.save import Saver, set_aside
from spider.common.errors import DamagedShard, Diverged, Preempted, TrainingError
from spider.common.results import StageFolder
from spider.config import StageSpec
from spider.data.loader import Batch, Batches, Loader, MixedLoader, batch_digest, digest_text
from spider.data.mixture import anew
from spider.data.packing import open_rows
from spider.model.layers import has_offsets
from spider.processes.parallel import full_tensor
from spider.processes.shutdown import StopSignals, Watchdog
from spider.processes.world import ALONE, World, peers_required
from spider.tokens import BYTES, Tokens
from spider.tokens.stored import TOKENIZER, read_tokens
from spider.training import compilation
from spider.training.build import Built, build, choose_arithmetic
from spider.training.memory import check_fits, out_of_memory, ran_out
from spider.training.passes import side_stream
from spider.training.precision import Precision, decide, device_name, fp8_layers
from spider.training.rollouts import AnswerValidation, Rollouts, Sampler
from spider.training.schedule import end_in_time, horizon, lr_factor, scheduled
from spider.training.state import Ema, Later, Means, Progress, State, read_parent
from spider.training.telemetry import Telemetry, Window, progress_bar, show, target_counts
from spider.training.validation import Probes, Validation

if TYPE_CHECKING:
    from spider.data.ngram.store import NgramIndex

log = logging.getLogger(__name__)

#: Steps in a row with a non-finite loss that stop the run. Fewer may come from bad batches and are skipped.
NAN_PATIENCE = 10
#: Steps after which the objects that stay are made, compiled code among them. On a GPU Python's collector
#: then leaves them out, because the device may idle while it looks at them.
SETTLED = 3


class Trainer:
    """One stage's live objects: model, optimizer, loader, progress.

    Args:
        origin: ``data_digest`` and ``parent_weights``, for the manifest. An optional ``resumed`` selects what
            to take from the parent: its ``weights``, or all of its ``training`` with the step count.
        spec: the stage, with numbers in the place of ``auto`` (`spider.training.memory`).
        identity: that of the stage as it is configured (default: that of ``spec``).
        parent: receipt of the previous stage, or the path to resume from; None starts from nothing.
        good: this stage's newest good checkpoint; None starts the stage.
        warmup: record of the warm-up for this shape.
        world: the processes that train together, each with its own trainer.
        indexes: n-gram indexes without and with the training text, for a model that reads one: it reads the
            first in training and the second in validation.
    """

    def __init__(
        self,
        spec: StageSpec,
        folder: Path,
        data: Path,
        origin: dict[str, str | None],
        *,
        identity: str | None = None,
        parent: Path | None = None,
        good: Checkpoint | None = None,
        warmup: Path | None = None,
        world: World = ALONE,
        indexes: tuple[NgramIndex, NgramIndex] | None = None,
    ) -> None:
        self.spec, self.settings = spec, spec.settings
        self.world, self.device = world, world.device
        self.origin, self.good = origin, good
        self.identity = good.training.identity if good else identity or spec.identity
        self._decide_shares(warmup)
        check_fits(spec, self.precision.kind, self.device, world.size)
        choose_arithmetic(spec, self.device)

        tokens = self._open_datasets(data)
        torch.manual_seed(seed_of(spec.seed, "weights"))
        built = build(spec, self.precision, world, data, tokens=tokens, indexes=indexes, warmup=warmup)
        self.model, self.passes, self.optimizer = built.model, built.passes, built.optimizer
        self.ema = Ema(self.model, self.settings.ema) if self.settings.ema else None
        self.state = State(spec, origin, self.model, self.optimizer, self.ema)

        self.progress = self._load_start(parent)
        self.means = Means.restore(self.progress.means, self.device)
        self._finite: Later | None = None  # of the last step
        self.sampler, self.answers = self._start_sampler(data)
        self.loader = self._start_loader()

        self._start_records(StageFolder(folder), data, tokens)
        self._start_measurements(StageFolder(folder), data, built)
        self._announce()

    def run(self, stop: StopSignals, on_step: Callable[[int], None] | None = None) -> Checkpoint | None:
        """Train to the stage's end, and return the final checkpoint."""
        progress = self.progress
        self._saved = time.perf_counter()
        self._parts = self._parts_done()
        owed = False  # a save that was due while steps were skipped
        window = Window()
        done_here = 0
        if self.answers is not None and not progress.step:
            first = self._answer_prompts(self.answers)
            if self.metrics is not None:
                self.metrics.write(progress.global_step, first)
        self.model.train()
        try:
            with (
                side_stream(self.device, enabled=self.passes.graphed),
                progress_bar(progress.step, progress.end, hidden=not self.world.first) as bar,
                Watchdog(self.settings.stall_minutes) as watchdog,
            ):
                while progress.end is None or progress.step < progress.end:
                    signum, failed = self.world.highest(stop.received or 0, self.saver.failed)
                    if signum:
                        self._leave(signum)
                    self.saver.settle(wait=bool(failed))
                    began = time.perf_counter()
                    with watchdog.watch("step", progress.global_step + 1), peers_required():
                        self._step(window)
                    took = time.perf_counter() - began
                    done_here += 1
                    if done_here == SETTLED and self.device.type == "cuda":
                        gc.collect()
                        gc.freeze()
                    window.steps += 1
                    window.tokens += self.spec.tokens_per_step
                    window.seconds += took
                    progress.seconds += took
                    bar.update()
                    decided = self._end_in_time(bar)
                    done = progress.step == progress.end
                    owed = self._save_is_due() or decided or done or owed
                    due = progress.step % self.settings.log_every == 0 or done
                    if owed or due:
                        self.settle()
                    saved = owed and not progress.streak
                    with peers_required():
                        validated = self._measure(watchdog, saved)
                    if due:
                        self._log(window, bar, validated)
                        window = Window()
                    elif validated and self.metrics is not None:
                        self.metrics.write(progress.global_step, validated)
                    if done:
                        self._refuse_skipped()
                    if saved:
                        self._save(final=done)
                        owed = False
                    if on_step is not None:
                        on_step(progress.step)
        except Diverged as error:
            raise self._diverged(error) if self.world.first else error from None
        finally:
            gc.unfreeze()
            self.loader.close()
            self.saver.close()
        self.validation.log_summary(progress, self.saver.root)
        return self.saver.newest

    def _step(self, window: Window) -> None:
        progress = self.progress
        began = time.perf_counter()
        try:
            batch = next(self.loader)
        except DamagedShard as error:
            raise TrainingError(f"reading ahead at step {progress.global_step}: {error}") from None
        window.waited += time.perf_counter() - began
        tokens = self.model.tokens
        targets_BT = batch.rows_BT1[:, 1:]
        learned_BT = targets_BT != tokens.pad if batch.learned_BT is None else batch.learned_BT
        counted_B = learned_BT.sum(1)
        bytes_BT = tokens.bytes_of[targets_BT] * learned_BT
        digest = batch_digest(batch.rows_BT1, self.world.rank * self.windows)
        targets, bytes_, digest = self.world.sum_ints(int(counted_B.sum()), int(bytes_BT.sum()), digest)
        if not targets:
            raise TrainingError(
                f"step {progress.global_step}: none of {targets_BT.size:,} targets is an assistant's; check "
                f"that {self.spec.data} holds conversations"
            )
        window.bytes += bytes_

        try:
            measured = self._forward_backward(batch, counted_B, targets)
            if batch.reward_B is not None:
                reward = batch.reward_B.mean() / self.world.size
                measured["reward"] = torch.full((), reward, dtype=torch.float64, device=self.device)
            measured = self.world.sum_tensors(measured)
            norm = full_tensor(nn.utils.get_total_norm(self.optimizer.gradients()))
            measured["grad_norm"] = norm
            finite = torch.isfinite(norm) & torch.isfinite(measured["loss"])
            self._update(finite, norm)
            if self.telemetry.learned:
                measured |= target_counts(targets, bytes_, self.device)
            self.means.add(measured, finite)
            self.settle()
            self._finite = Later(finite)
        except RuntimeError as error:
            if ran_out(error):
                where = f"at step {progress.global_step}"
                raise TrainingError(out_of_memory(self.spec, self.world.size, where, error)) from error
            if failed := compilation.compiler_failed(error):
                raise TrainingError(failed) from error
            raise
        self.model.after_step(updated=finite)
        self.optimizer.zero_grad(free=not self.passes.graphed)

        progress.step += 1
        progress.global_step += 1
        progress.tokens += self.spec.tokens_per_step
        progress.global_tokens += self.spec.tokens_per_step
        progress.bytes += bytes_
        progress.batches.append(digest_text(digest))
        progress.position = batch.position
        progress.epoch = self.loader.epoch(batch.position)
        progress.validated = None

    def _forward_backward(self, batch: Batch, counted_B: np.ndarray, targets: int) -> dict[str, Tensor]:
        """Accumulate the gradient of the step's mean loss and return this process's share of the means.

        A micro-batch is weighted by its share of the targets, so that with padding ``grad_accum`` does not
        change the loss.

        Args:
            counted_B: targets in each window of this process.
            targets: targets of the whole step, all processes together.
        """
        counts = counted_B.reshape(self.micro_batches, -1).sum(1).tolist()
        totals: list[Tensor] = []
        for i, micro in enumerate(batch.split(self.micro_batches), start=1):
            weight = counts[i - 1] / targets
            self._seed("micro-batch", self.world.rank * self.micro_batches + i)
            found = self.passes(micro, weight, self.model.tokens.pad, last=i == self.micro_batches)
            weighted = torch._foreach_mul(list(found.values()), weight)
            totals = list(torch._foreach_add(totals, weighted) if totals else weighted)
        self.passes.exchange()
        return dict(zip(found, totals, strict=True))

    def _measure(self, watchdog: Watchdog, saved: bool) -> dict[str, float]:
        """Return the metrics of what is due after this step, each under a watch of its own."""
        progress, found = self.progress, dict[str, float]()
        if self.validation.is_due(progress, saved=saved):
            with watchdog.watch("validation after step", progress.global_step):
                found |= self.validation.after(progress)
        if found and self.answers is not None:
            with watchdog.watch("answers after step", progress.global_step):
                found |= self._answer_prompts(self.answers)
        if any(due := self.probes.due(progress)):
            with watchdog.watch("probes after step", progress.global_step):
                found |= self.probes.after(progress, *due)
        return found

    def _answer_prompts(self, answers: AnswerValidation) -> dict[str, float]:
        """Answer the held-out prompts and return the metrics of the answers."""
        began = time.perf_counter()
        sums = {name: torch.tensor(value, device=self.device) for name, value in answers.sums().items()}
        values = {name: float(value) for name, value in self.world.sum_tensors(sums).items()}
        self.progress.validation_seconds += time.perf_counter() - began
        shown = ", ".join(f"{name.removeprefix('val/')} {value:.3f}" for name, value in values.items())
        log.info("step %d: %s", self.progress.step, shown)
        return values

    def _update(self, finite: Tensor, norm: Tensor) -> None:
        """Update the weights, unless the loss or the norm of the gradient is not ``finite``."""
        step, clip = self.progress.step, self.spec.optimizer.clip
        self._seed("update")
        self.optimizer.set_lr(lr_factor(step, self.progress.end, self.settings))
        self.optimizer.set_scheduled(**self._scheduled(step, self.progress.global_step))
        # The 1e-6 is that of torch's clip_grad_norm_.
        self.optimizer.step(finite, None if clip is None else (clip / (norm + 1e-6)).clamp(max=1))
        self.precision.after_update(self.model)
        if self.ema is not None:
            self.ema.update(step + 1, finite)

    def _scheduled(self, step: int, run_step: int) -> dict[str, Any]:
        return scheduled(step, run_step, self.progress.end, self.settings, self.spec.optimizer)

    def _seed(self, *purpose: object) -> None:
        """Seed torch's generator for the next random draws of this step."""
        torch.manual_seed(seed_of(self.spec.seed, "step", self.spec.index, self.progress.step, *purpose))

    def _end_in_time(self, bar: tqdm) -> bool:
        """Fix the stage's end when ``max_hours`` requires it, and return whether that happened now.

        The decision must be saved at once: a resumed run must end at the same step.
        """
        progress = self.progress
        if self.settings.max_hours is None:
            return False
        step, seconds, limit = progress.step, progress.spent, progress.end
        end = self.world.from_first(lambda: end_in_time(step, seconds, limit, self.settings))
        if end is None:
            return False
        progress.end = bar.total = end
        log.info("step %d: max_hours ends this stage after %d steps", progress.step, end)
        return True

    def settle(self) -> None:
        """Read whether the last step's loss and gradient were finite, and count it.

        Raises:
            Diverged: they were not, in `NAN_PATIENCE` steps in a row.
        """
        later, self._finite = self._finite, None
        progress = self.progress
        if later is None:
            return
        if later.read():
            progress.streak = 0
            return
        progress.skipped += 1
        progress.streak += 1
        log.warning("step %d: the loss or its gradient is not finite, update skipped", progress.global_step)
        if progress.streak >= NAN_PATIENCE:
            self.saver.settle()
            raise Diverged(f"{progress.streak} steps in a row without a finite loss")

    def _refuse_skipped(self) -> None:
        """Raise `Diverged` if the stage ends with a skipped step, or if it skipped more than half of them."""
        progress = self.progress
        if progress.streak or 2 * progress.skipped > progress.step:
            self.saver.settle()
            last = ", the last one too" if progress.streak else ""
            raise Diverged(
                f"the stage has no result, {progress.skipped} of {progress.step} steps were skipped{last}"
            )

    def _diverged(self, error: Diverged) -> TrainingError:
        """Return the error with the last good checkpoint and the remedy.

        A checkpoint is good if a finite loss came after it. One without is set aside, because its weights may
        be the ones that overflow.
        """
        self.saver.close()
        progress, root = self.progress, self.saver.root
        for path in steps(root):
            if step_of(path) >= progress.global_step - progress.streak:
                aside = set_aside(path, "diverged")
                log.warning("%s: no finite loss came after it, kept as %s", path, aside.name)
        good = steps(root)
        move, elsewhere = "", ""
        if good:
            move, elsewhere = f"move {root.parent} away and ", f", or go on elsewhere: --resume {good[-1]}"
        return TrainingError(
            f"step {progress.global_step}: {error}; the last good checkpoint is "
            f"{good[-1] if good else 'none in this stage'}. The same settings fail again: lower lr or "
            f"optimizer.clip, or inspect the data around {progress.position}; then {move}run again{elsewhere}"
        )

    def _leave(self, signum: int) -> None:
        """Save the steps since the last checkpoint, unless the last one was skipped; raise `Preempted`."""
        self.saver.settle()
        self.settle()
        if self.progress.step and not self.progress.streak and self.saver.begun != self.progress.global_step:
            self._save(final=False)
        self.saver.settle()
        raise Preempted(signum, self.progress.global_step)

    def _save_is_due(self) -> bool:
        settings, before, self._parts = self.settings, self._parts, self._parts_done()
        if self._parts > before:
            return True
        if settings.ckpt_minutes is None:
            return self.progress.step % settings.ckpt_every == 0
        due = self._saved + 60 * settings.ckpt_minutes
        return self.world.from_first(lambda: time.perf_counter() >= due)

    def _parts_done(self) -> int:
        """Return how many of the equal parts of the stage that end with a scored checkpoint are done."""
        hours = self.settings.max_hours
        done = partial(parts_done, self.spec.evaluation.checkpoints, self.progress, hours)
        return self.world.from_first(done) if hours else done()

    def _save(self, *, final: bool) -> None:
        began = time.perf_counter()
        self._saved = began
        self.progress.means = self.means.plain()
        record = {
            "run": self.spec.run,
            "stage": self.spec.stage,
            "identity": self.identity,
            "spec": self.spec.model_dump(mode="json"),
            "final": final,
            **self.origin,
            "precision": {**asdict(self.precision), "layers": sorted(self.precision.layers or [])},
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "processes": self.world.size,
            "parallel": self.spec.parallel if self.world.size > 1 else None,
            "graphs": self.passes.graphed,
            "torch": torch.__version__,
            **asdict(self.progress),
        }
        if places := (self.progress.position or {}).get("places"):  # of a stream: each process has its own
            record["position"]["places"] = self.world.sum_ints(*places, reduction=dist.ReduceOp.MAX)
        with peers_required():
            self.saver.start(self.state.tensors(), record)
        if final:
            self.saver.settle()
        self.progress.checkpoint_seconds += time.perf_counter() - began

    def _log(self, window: Window, bar: tqdm, validated: dict[str, float]) -> None:
        means = self.means
        self.means = Means()
        batches, self.progress.batches = self.progress.batches, []
        if self.metrics is None:
            return
        progress = self.progress
        if progress.end is not None:
            left = progress.end - progress.step
        else:  # max_hours: estimate from the pace so far
            assert self.settings.max_hours is not None
            left = max(1, int((self.settings.max_hours * 3600 / progress.spent - 1) * progress.step))
        assert progress.position is not None and progress.epoch is not None, "a step is done"
        factor = lr_factor(progress.step - 1, progress.end, self.settings)
        now = {
            "epoch": progress.epoch,
            **{f"epoch_{name}": done for name, done in self.loader.epochs(progress.position).items()},
            "tokens": float(progress.global_tokens),
            "seconds": progress.spent,
            "lr": factor * self.settings.lr,
        }
        for group in self.optimizer.param_groups:
            if group["muon"]:
                now["muon_lr"] = factor * group["peak_lr"]
        now |= self._scheduled(progress.step - 1, progress.global_step - 1)
        now["skipped_steps"] = progress.skipped
        window.pauses = (progress.checkpoint_seconds + progress.validation_seconds) / progress.step
        values = means.read()
        row = self.telemetry.row(values, now, window, left)
        if values:
            loss = row.get("train/cross_entropy", row["train/loss"])
            progress.loss = loss
            progress.best_loss = loss if progress.best_loss is None else min(loss, progress.best_loss)
        progress.batches = self.metrics.write(progress.global_step, row | validated, batches)
        show(row, progress.step, progress.step + left, bar, {**self.model.shown, "reward": "reward {:.3f}"})

    def _announce(self) -> None:
        """Log the model, the optimizer, the batch, the attention, the checkpoints and the steps to train."""
        spec, world, micro_batch = self.spec, self.world, self.windows // self.micro_batches
        parts = "; ".join(f"{name} {count:,}" for name, count in self.model.parameters_by_part().items())
        log.info("parameters: %s (%s)", f"{self.model.num_parameters():,}", parts)
        log.info("fp8: %s", fp8_layers(self.model))
        config = spec.optimizer
        rates = f"lr {self.settings.lr:g}"
        for group in self.optimizer.param_groups:
            if group["muon"]:
                rates += f", {group['peak_lr']:g} for {group['name']}"
        log.info("optimizer: %s, %s, weight decay %g", config.kind, rates, config.weight_decay)
        processes = "1 process" if world.size == 1 else f"each of {world.size} processes, {spec.parallel}"
        batch = f"{spec.windows_per_step} windows of {self.settings.seq_len:,}"
        batch += f" ({self.micro_batches} micro-batches of {micro_batch} on {processes})"
        log.info("global batch: %s tokens a step, %s", f"{spec.tokens_per_step:,}", batch)
        assert self.settings.micro_batch != "auto", "the stage is fitted"
        if 2 * micro_batch < min(self.settings.micro_batch, self.windows):
            shared = f"no number from there to micro_batch divides the {self.windows} windows of each process"
            nearest = max(1, round(self.settings.grad_accum / world.size)) * world.size
            remedy = f"a multiple of the processes as grad_accum, such as {nearest}, keeps micro_batch"
            log.warning("a pass has %d windows, because %s; %s", micro_batch, shared, remedy)
        path = "flash attention" if has_offsets(self.device, self.precision.compute) else "SDPA with a mask"
        log.info("attention: %s within windows and documents, SDPA elsewhere", path)
        minutes, steps = self.settings.ckpt_minutes, self.settings.ckpt_every
        saved = f"{minutes:g} minutes, whatever ckpt_every is" if minutes else f"{steps} steps"
        log.info("checkpoints: every %s, and %d at equal shares", saved, spec.evaluation.checkpoints)
        end = "max_hours" if self.progress.end is None else f"step {self.progress.end:,}"
        log.info("training from step %s to %s", f"{self.progress.step:,}", end)

    def _decide_shares(self, warmup: Path | None) -> None:
        """Decide the windows of this process, its micro-batches and the precision, as all processes do."""
        micro_batch = self.world.from_first(lambda: self.spec.micro_batch(self.world.size))
        self.windows = self.spec.windows_per_step // self.world.size
        self.micro_batches = self.windows // micro_batch
        self.precision = self.world.from_first(lambda: self._decide_precision(warmup))

    def _open_datasets(self, data: Path) -> Tokens:
        """Open the training text of each dataset, packed if the stage reads packed rows; return its
        vocabulary."""
        packed = self.settings.seq_len if self.settings.packing == "best_fit" else None
        if self.spec.stream:
            self._opened = {}
            return read_tokens(data / TOKENIZER) if self.spec.stream.tokenizer else BYTES
        folders = self.spec.folders(data)
        self._opened = {name: open_rows(folder, packed) for name, folder in folders.items()}
        return next(one.shards.vocabulary for one in self._opened.values())

    def _decide_precision(self, warmup: Path | None) -> Precision:
        """Return the configured precision; a resumed stage keeps the one that it began with."""
        measured = Warmup.read(warmup) if warmup else None
        chosen = decide(self.spec.precision, self.device, measured)
        if self.good is not None:
            chosen = chosen.unless_began_as(self.good.training.precision, self.device)
        log.info("precision: %s", chosen)
        return chosen

    def _load_start(self, parent: Path | None) -> Progress:
        """Load this stage's checkpoint, or else its parent, and return the progress to continue from."""
        if self.good is not None:
            return self.state.resume(self.good, self.world.size)
        end = horizon(self.spec, self.model)
        if parent is None:
            return self.state.start(None, end)
        # Verifying reads the whole checkpoint, so only one process does it and reports errors.
        before = self.world.from_first(lambda: read_parent(self.spec, parent, self.model.tokens))
        return self.state.start(before, end)

    def _start_sampler(self, data: Path) -> tuple[Sampler | None, AnswerValidation | None]:
        """Return what samples answers in a stage with ``rollouts``, and what scores them."""
        if not self.settings.rollouts:
            return None, None
        seeds = partial(seed_of, self.spec.seed, "rollouts", self.spec.index)
        sampler = Sampler(self.model, self.spec, seeds, partial(self.precision.autocast, self.device))
        if not self.settings.val_every:
            return sampler, None
        return sampler, AnswerValidation(data, sampler, self.world.rank, self.world.size)

    def _start_loader(self) -> Batches:
        """Return the stage's batches, from its position on."""
        spec, position = self.spec, self.progress.position
        seed = position["seed"] if position else seed_of(spec.seed, "order", spec.index)
        rows: dict[str, Any] = {"seq_len": self.settings.seq_len, "rows": self.windows, "seed": seed}
        share: dict[str, Any] = {"rank": self.world.rank, "world": self.world.size}
        if spec.stream is not None:
            rows |= {"tokens": self.model.tokens} if spec.stream.tokenizer else {}
            streamed: Batches = spec.stream.source.batches(spec.stream, **rows, **share, position=position)
            return streamed
        if self.sampler is not None:
            shards = self._opened[spec.data].shards
            return Rollouts(shards, self.sampler, **rows, **share, position=position)
        rows |= {
            "lookup": self.model.lookup,
            "answers": self.settings.learn == "assistant",
            "shuffled": self.settings.order == "shuffled",
        }
        if not spec.mixed:
            (one,) = self._opened.values()
            return Loader(one.shards, one.packed, **rows, **share, position=position)
        sources = {name: Loader(one.shards, one.packed, **rows) for name, one in self._opened.items()}
        if position and not self.progress.step:
            position = anew(position)
        (_, weights), *switches = spec.mixture.mixes
        return MixedLoader(sources, weights, switches, rows=self.windows, **share, position=position)

    def _start_records(self, folder: StageFolder, data: Path, tokens: Tokens) -> None:
        """Open what is written on the way: metrics, checkpoints and the log line."""
        learned = tokens.digest is not None
        self.metrics = MetricsLog(folder.metrics) if self.world.first else None
        tokenizer = data / TOKENIZER if learned else None
        shares = self.spec.evaluation.checkpoints
        self.saver = Saver(folder.checkpoints, self.good, self.world, tokenizer, shares)
        flops = self.model.flops_per_token(self.settings.seq_len, self.settings.n_loops) / self.world.size
        self.telemetry = Telemetry(self.device, self.precision.kind, flops, learned)

    def _start_measurements(self, folder: StageFolder, data: Path, built: Built) -> None:
        """Open what is measured on the way: held-out text, tasks and samples."""
        self.validation = Validation(
            spec=self.spec,
            data=data,
            model=self.model,
            world=self.world,
            precision=self.precision,
            ema=self.ema,
            full_lookup=built.full_lookup,
            compiled=built.compiled,
        )
        converses = self.origin.get("conversations") is not None
        self.probes = Probes(self.validation, folder.samples, converses)


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed for a list of names and numbers."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
