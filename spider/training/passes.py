"""Forward and backward pass of a micro-batch, called again and again, or replayed as one CUDA graph.

A step of spider-1b launches 25,000 kernels, and to launch one costs the host more time than the GPU needs to
run it. So on a GPU the first step runs as it is written, and compiles. The second one captures the passes of
a micro-batch, and from there on each micro-batch is one launch. What a replay reads stays in place: its
inputs, the weight of its loss and the gradients, which are zeroed and not freed. Random numbers are those of
torch's generator, which a replay takes from the seed that was set before it. So a replay computes the bits
that the calls would.

Of several processes, each replays its own passes, and then `sum_gradients` exchanges the gradients of a step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from spider.common.errors import TrainingError
from spider.config import StageSpec
from spider.data.loader import Batch
from spider.processes.parallel import exchange_gradients, sum_gradients
from spider.processes.world import World
from spider.tokens import IGNORED
from spider.training.memory import ran_out
from spider.training.precision import Precision

log = logging.getLogger(__name__)

Inputs = dict[str, Tensor]
"""``tokens_BT``, ``labels_BT``, the model's other arguments, and ``weight``, by which a loss counts in its
step. Answers have their ``advantage_B`` and the number of their tokens, ``learned``."""
Measured = dict[str, Tensor]
"""Scalars on the device by name: ``loss`` and the metrics of the forward pass."""

#: Inputs that are no arguments of the model.
_OF_LOSS = ("weight", "advantage_B", "learned")


def why_eager(spec: StageSpec, device: torch.device, processes: int, *, compiled: bool) -> str | None:
    """Return why a training launches its kernels one by one; None if it replays a graph."""
    if device.type != "cuda":
        return "a CPU has none"
    if spec.graphs == "off":
        return "graphs: off"
    if spec.settings.rollouts:
        return "answers have another length in each step"
    if spec.parallel == "fsdp" and processes > 1:
        return "parallel: fsdp gathers weights between kernels"
    if not compiled:
        return "shapes of a model that is not compiled depend on its data"
    return None


def inputs_of(micro: Batch, device: torch.device, pad: int, spec: StageSpec) -> Inputs:
    """Return on the device the arguments of the model for a micro-batch, and what its loss needs beside them.

    Padding and targets that are not learned get the label `IGNORED`. Ids and numbers of documents move as
    uint16 and are widened on the device, which is a quarter of the traffic of int64. All tensors are
    contiguous, as the copies in `Graph` are, so that the model is compiled once for both.
    """
    wanted = {"rows_BT1", "learned_BT", "candidates_BTW", "advantage_B"}
    wanted |= {"document_BT"} if spec.settings.attend == "document" else set()
    moved = {name: _copied(array, device) for name, array in micro.arrays().items() if name in wanted}
    rows_BT1 = moved.pop("rows_BT1")
    labels_BT = rows_BT1[:, 1:].long()
    if "learned_BT" in moved:
        labels_BT.masked_fill_(~moved.pop("learned_BT"), IGNORED)
    elif pad in micro.rows_BT1:  # seldom, and the host finds out sooner
        labels_BT.masked_fill_(labels_BT == pad, IGNORED)
    inputs = {"tokens_BT": rows_BT1[:, :-1].long(), "labels_BT": labels_BT, **moved}
    if "document_BT" in moved:
        inputs["document_BT"] = moved["document_BT"].long()
    if "advantage_B" in moved:
        assert micro.learned_BT is not None, "answers say which of their tokens are learned"
        inputs["learned"] = labels_BT.new_full((), max(1, int(micro.learned_BT.sum())), dtype=torch.float32)
    return {name: tensor.contiguous() for name, tensor in inputs.items()}


def _copied(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device.

    A GPU copies from pinned memory while the host goes on. From other memory the host would wait for all work
    that is queued before.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def loss_of(
    model: nn.Module, inputs: Inputs, spec: StageSpec, precision: Precision
) -> tuple[Tensor, Measured]:
    """Return the mean loss of the targets of a micro-batch, and the metrics of its forward pass."""
    arguments = {name: tensor for name, tensor in inputs.items() if name not in _OF_LOSS}
    tokens_BT, labels_BT = arguments.pop("tokens_BT"), arguments.pop("labels_BT")
    advantage_B = inputs.get("advantage_B")
    reduction = "mean" if advantage_B is None else "none"
    with precision.autocast(tokens_BT.device):
        out = model(tokens_BT, labels_BT, n_loops=spec.loops, reduction=reduction, **arguments)
    if advantage_B is None:
        return out.loss, out.metrics
    return (out.loss.sum(1) * advantage_B).sum() / inputs["learned"], out.metrics


@contextlib.contextmanager
def side_stream(device: torch.device, *, enabled: bool) -> Iterator[None]:
    """Run what is inside on a stream of its own, which can be captured, other than the default one."""
    if not enabled or device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


class Graph:
    """A function of tensors that was captured: its inputs and outputs keep their place in memory.

    On a CPU the function is called anew.

    Args:
        function: takes the inputs by name and returns tensors by name. It ran before on the current stream.
        inputs: examples of the inputs. Their values are copied.
    """

    def __init__(self, function: Callable[[Inputs], Measured], inputs: Inputs) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._call: Callable[[], Measured] = partial(function, self._inputs)
        device = next(iter(inputs.values())).device
        if device.type == "cuda":
            captured = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream(device)
            # The threads that write a checkpoint or copy data may allocate meanwhile.
            with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
                outputs = function(self._inputs)

            def replay() -> Measured:
                captured.replay()
                return outputs

            self._call = replay

    def takes(self, inputs: Inputs) -> bool:
        """Return whether these inputs have the shapes that were captured."""
        shapes = {name: tensor.shape for name, tensor in inputs.items()}
        return shapes == {name: tensor.shape for name, tensor in self._inputs.items()}

    def __call__(self, inputs: Inputs) -> Measured:
        """Return the outputs for these inputs, which the next call overwrites."""
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        return self._call()


class Passes:
    """The passes of a training's micro-batches. Each call adds a gradient to those of the parameters.

    Args:
        model: the model, wrapped in DDP where several processes do not replay.

    Attributes:
        graphed: whether they are replayed.

    Raises:
        TrainingError: the passes cannot be captured, for example because the host waits inside of them.
    """

    def __init__(
        self, model: nn.Module, spec: StageSpec, precision: Precision, world: World, *, graphed: bool
    ) -> None:
        self.graphed = graphed
        self._model = model
        self._spec = spec
        self._precision = precision
        self.device = world.device
        self._world = world
        self._began = False
        self._graph: Graph | None = None

    def __call__(self, micro: Batch, weight: float, pad: int, *, last: bool) -> Measured:
        """Run one micro-batch and return its loss and metrics, which the next call may overwrite.

        Args:
            weight: factor of the loss in the gradient of the step.
            pad: id of padding.
            last: whether it is the step's last one.
        """
        inputs = inputs_of(micro, self.device, pad, self._spec)
        # DDP averages gradients; multiply by the world size to get their sum.
        factor = weight if self.graphed else weight * self._world.size
        inputs["weight"] = inputs["tokens_BT"].new_full((), factor, dtype=torch.float32)
        if not self.graphed:
            with exchange_gradients(self._model, enabled=last):
                return self._run(inputs)
        if not self._began:  # this call compiles, and creates the gradients
            self._began = True
            return self._run(inputs)
        if self._graph is None:
            self._graph = self._capture(inputs)
        if not self._graph.takes(inputs):
            shape = " x ".join(map(str, inputs["tokens_BT"].shape))
            log.warning("CUDA graph: launching a micro-batch of %s by itself, as others are larger", shape)
            return self._run(inputs)
        return self._graph(inputs)

    def _capture(self, inputs: Inputs) -> Graph:
        began = time.perf_counter()
        try:
            graph = Graph(self._run, inputs)
        except RuntimeError as error:
            if ran_out(error):
                raise
            reason = str(error).strip().splitlines()[0]
            raise TrainingError(
                f"CUDA graph: the passes of this model cannot be captured here ({reason}); set graphs: off"
            ) from error
        log.info("CUDA graph: captured in %.1f s", time.perf_counter() - began)
        return graph

    def _run(self, inputs: Inputs) -> Measured:
        loss, metrics = loss_of(self._model, inputs, self._spec, self._precision)
        (loss * inputs["weight"]).backward()
        return {"loss": loss.detach(), **metrics}

    def exchange(self) -> None:
        """Sum the gradients of a step over the processes, unless a wrapper has done it."""
        if self.graphed and self._world.size > 1:
            sum_gradients(self._model)
