"""AdamW and Muon in one optimizer, and torchao's AdamW of 8 bits behind the same interface.

AdamW (Loshchilov and Hutter, arXiv:1711.05101) trains embeddings, norms, biases and tables; with ``kind:
adamw`` it trains everything. Muon (Jordan, 2024) trains hidden matrices. It replaces the momentum of a matrix
by the nearest semi-orthogonal one, so that all directions of a layer learn at one speed:

    m <- mu m + (1 - mu) g;   u = (1 - mu) g + mu m  (Nesterov);   W <- W - lr max(1, out/in)^1/2 polar(u)

Its learning rate is ``muon_lr_ratio`` times the stage's ``lr``, so that one rate scales a stage. A ratio of
0.2 width^1/2 makes the updates of square matrices as large as AdamW's (Liu et al., arXiv:2502.16982).

The polar factor comes from Polar Express (Amsel et al., arXiv:2505.16932): five quintic polynomials ``a X +
(b A + c A^2) X`` with ``A = X X^T``. Each is optimal for the singular values that the previous ones leave.
They consist of matrix products, so they run in bf16 if the run's own products do. All matrices of one shape
form one batch, which is split to bound the scratch memory. A stack of experts (E, in, out) counts as E
matrices.

Weight decay is decoupled. For Muon's matrices it is also cautious (Chen et al., arXiv:2510.12402): it acts
only where it pulls in the direction of the update, unless ``cautious_decay: false``. Vectors are not decayed.
Tables are decayed only by the ``weight_decay`` of their group, because a batch touches few of their rows. The
settings of a group may say otherwise (`spider.config.run.GroupConfig`).

With ``muon_rows`` the rows of a momentum, its outputs, are scaled to one length before the polar factor
(MuonEq, arXiv:2603.28254). A parameter's group (`Model.parameter_groups`) may multiply the rate of its role.

With ``muon_beta2`` all neurons get equal shares of an update, as in NorMuon (Li et al., arXiv:2510.05491).
All singular values of a polar factor are 1, but if it has more rows than columns its rows may differ much in
length. So each neuron's update is divided by the root of a running mean square (`even_out`):

    v <- beta2 v + (1 - beta2) mean(u^2);   u' = u / v^1/2;   u' |u| / |u'|   (Frobenius norms)

The mean runs over the shorter side of a matrix: v has one value for each row of a tall matrix, for each
column of a wide one. The paper always uses rows. But the rows of a wide polar factor already have equal
length, while its columns, the neurons of the layer before, do not. (nanochat does the same.) No bias
correction is needed for v starting at 0: the last normalisation cancels it.

State is fp32 (except `LowBitAdamW`'s), or float64 for such weights. A checkpoint names it by the parameter.
Each process updates its slice of a sharded parameter (`spider.processes.parallel`). Of W processes, each
computes the polar factors of every W-th matrix and receives the others (`distribute`).

In bf16 (``weights`` of a group) weights and gradients take 2 bytes a value less each. Bf16 has 8 bits of
precision, so rounding to nearest would drop every update below 1/256 of the weight. Torchao rounds at random
instead: up with the probability of the fraction that is cut off, which is right on average. Only matrices
become bf16. Norms and the recurrence's vectors are not multiplied under autocast and form the fp32 residual
stream. The random numbers come from torch's generator, which the training loop seeds at every step. A table
becomes bf16 by ``weights: bf16`` of its group. AdamW rounds it to nearest, as nanochat does.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from spider.config import GroupConfig, OptimizerConfig
from spider.model.interface import Model, ParameterGroup
from spider.processes.parallel import distribute, dtensor_like, local, sum_over_slices
from spider.processes.world import ALONE, World
from spider.training.precision import quiet_torchao

#: arXiv:2505.16932, for singular values in [1e-3, 1].
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
#: The polynomials grow fast above 1, and bf16 rounding may lift a singular value above it: start lower.
_SAFETY = 1.01
#: nanochat tuned its rates at this width, where ``width_exponent`` changes nothing.
_BASE_WIDTH = 768
_SCRATCH_NUMEL = 1 << 26
_SMALLEST_MOMENT, _SMALLEST_BLOCK = 4096, 32

#: Parameters of one shape, which are stacked, and the batches that fit into the scratch memory at once.
_Batch = list[Tensor]
_Round = list[_Batch]


def polar(g_Nrc: Tensor) -> Tensor:
    """Approximate the polar factor ``U V^T`` of each of N matrices ``g = U S V^T``, in their dtype.

    Its singular values are within about 0.1 of 1.
    """
    tall = g_Nrc.size(-2) > g_Nrc.size(-1)
    x = g_Nrc.mT if tall else g_Nrc
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * _SAFETY + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        a, b, c = a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Optimizer:
    """AdamW for groups with ``muon: False``, Muon for the others. A group carries its ``peak_lr``.

    It does not derive from torch's optimizers, because importing them imports the compiler, which takes
    seconds.
    """

    def __init__(self, groups: list[dict[str, Any]], world: World = ALONE) -> None:
        self.param_groups = groups
        self.world = world
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._spread: dict[Tensor, Tensor] = {}  # zeros in the shape of a table, but during its update
        dense = world.size > 1 or any(group["decay"] == "l2" for group in groups)
        for group in groups:
            for p in group["params"]:
                names = ("momentum",) if group["muon"] else ("exp_avg", "exp_avg_sq")
                dtype = torch.promote_types(p.dtype, torch.float32)
                self.state[p] = {name: torch.zeros_like(p, dtype=dtype) for name in names}
                p.by_rows = not (dense or group["muon"] or p.is_cuda)  # type: ignore[attr-defined]
                if not group["muon"]:
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                elif group["beta2"] is not None:
                    self.state[p]["second_moment"] = no_moment(p, dtype)
        self.set_lr(1.0)

    def set_lr(self, factor: float) -> None:
        for group in self.param_groups:
            group["lr"] = group["peak_lr"] * factor

    def set_scheduled(self, *, weight_decay: float | None = None, muon_momentum: float | None = None) -> None:
        """Set what `spider.training.schedule.scheduled` returns for a step."""
        for group in self.param_groups:
            if weight_decay is not None and group["decayed"]:
                group["weight_decay"] = weight_decay
            if muon_momentum is not None:
                group["momentum"] = muon_momentum

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the live state as ``{parameter name}.{state name}``, to save it or to load one into it."""
        named = model.named_parameters()
        return {f"{name}.{key}": t for name, p in named for key, t in self.state.get(p, {}).items()}

    def zero_grad(self, *, free: bool = True) -> None:
        """Remove the gradients; or else, but for those that may be sparse, fill them with zeros in place."""
        for p in self._parameters():
            if free or getattr(p, "by_rows", False):
                p.grad = None
        if kept := [p.grad for p in self._parameters() if p.grad is not None]:
            torch._foreach_zero_(kept)

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter that has one; of a sparse one the rows, each id once."""
        parameters = [p for p in self._parameters() if p.grad is not None]
        for p in parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()
        return [p.grad.values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def add_decay_to_gradients(self) -> None:
        """Add the weight decay of the groups with ``decay: l2`` to their gradients."""
        for group in self.param_groups:
            if group["decay"] == "l2":
                for p in group["params"]:
                    if p.grad is not None:
                        local(p.grad).add_(local(p), alpha=group["weight_decay"])

    @torch.no_grad()
    def step(self, finite: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Update the parameters.

        Args:
            finite: scalar bool on the device. Where it is False, parameters and state stay as they are.
            factor: scalar that the gradients are multiplied by first.
        """
        if finite is None:
            finite = torch.ones((), dtype=torch.bool, device=self._parameters()[0].device)
        if not (finite.is_cuda or finite):  # nothing waits
            return
        if factor is not None and any(group["decay"] == "l2" for group in self.param_groups):
            torch._foreach_mul_(_gradients(self._parameters()), factor)
            factor = None
        self.add_decay_to_gradients()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group["muon"]:
                self._muon(group, params, finite, factor)
            else:
                self._adamw(group, params, finite, factor)

    def _adamw(
        self, group: dict[str, Any], params: list[Tensor], finite: Tensor, factor: Tensor | None
    ) -> None:
        params = [p for p in params if local(p).numel()]
        states = [self.state[p] for p in params]
        weights = [local(p) for p in params]
        exact = [_widened(w) for w in weights]
        adamw(
            exact,
            [_widened(self._in_full(p, g)) for p, g in zip(params, _gradients(params), strict=True)],
            [local(s["exp_avg"]) for s in states],
            [local(s["exp_avg_sq"]) for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=_decoupled(group),
            eps=group["eps"],
            maximize=False,
            grad_scale=None if factor is None else factor.float().reciprocal(),  # divides
            found_inf=(~finite).float(),
        )
        for weight, new in zip(weights, exact, strict=True):
            if weight is not new:
                weight.copy_(new)
        for p in params:
            if p.grad is not None and p.grad.is_sparse:
                self._spread[p].index_fill_(0, p.grad.coalesce().indices()[0], 0)

    def _in_full(self, p: Tensor, gradient: Tensor) -> Tensor:
        """Return a gradient; a sparse one with zeros in the rows that it leaves out."""
        if not gradient.is_sparse:
            return gradient
        rows = gradient.coalesce()
        if p not in self._spread:
            self._spread[p] = torch.zeros_like(p)
        return self._spread[p].index_copy_(0, rows.indices()[0], rows.values())

    def _muon(
        self, group: dict[str, Any], params: list[Tensor], finite: Tensor, factor: Tensor | None
    ) -> None:
        first = 0
        for batches in self._rounds(params):
            stacks = [self._steps(group, batch, finite, factor).to(group["compute"]) for batch in batches]
            updates = distribute(polar, stacks, [batch[0] for batch in batches], self.world, first)
            for batch, u_Nrc in zip(batches, updates, strict=True):
                self._apply(group, batch, u_Nrc.to(self.state[batch[0]]["momentum"].dtype), finite)
                first += len(batch) * batch[0].shape[:-2].numel()

    def _rounds(self, params: list[Tensor]) -> list[_Round]:
        """Return the rounds in which the polar factors of these parameters are computed.

        Several processes exchange all batches of a round in one message; a single process has one batch a
        round. `_SCRATCH_NUMEL` bounds the values of both.
        """
        by_shape: dict[torch.Size, _Batch] = defaultdict(list)
        for p in params:
            by_shape[p.shape].append(p)
        rounds: list[_Round] = []
        left = 0
        for shape, same in by_shape.items():
            per_batch = max(1, _SCRATCH_NUMEL // shape.numel())
            for i in range(0, len(same), per_batch):
                batch = same[i : i + per_batch]
                size = len(batch) * shape.numel()
                if size > left or self.world.size == 1:
                    rounds.append([])
                    left = _SCRATCH_NUMEL
                rounds[-1].append(batch)
                left -= size
        return rounds

    def _steps(
        self, group: dict[str, Any], params: list[Tensor], finite: Tensor, factor: Tensor | None
    ) -> Tensor:
        """Return Nesterov's momenta of parameters of one shape: one matrix each, or E of a stack.

        In a group with ``rows`` the momentum of each output's weights is scaled to length 1.
        """
        grads = [_widened(g) for g in _gradients(params)]
        momenta = [local(self.state[p]["momentum"]) for p in params]
        if factor is not None:
            grads = list(torch._foreach_mul(grads, factor))
        if finite.is_cuda:  # A momentum that moves towards itself stays as it is.
            grads = [torch.where(finite, g, m) for g, m in zip(grads, momenta, strict=True)]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        steps = torch._foreach_lerp(grads, momenta, group["momentum"])
        if params[0].ndim == 3:
            steps_Nrc = torch.stack(steps).flatten(0, 1)
        else:
            steps_Nrc = torch.stack(steps, 1).transpose(0, 1)  # rows first, because they may be sharded
        if not group["rows"]:
            return steps_Nrc
        inputs = -2 if params[0].ndim == 3 else -1
        return steps_Nrc / steps_Nrc.norm(dim=inputs, keepdim=True).clamp(min=1e-12)

    def _apply(self, group: dict[str, Any], params: list[Tensor], u_Nrc: Tensor, finite: Tensor) -> None:
        """Move parameters of one shape against their polar factors."""
        pattern = params[0]
        rows, cols = pattern.shape[-2:]
        # A linear map is stored (out, in), a stack of experts (E, in, out).
        gain = max(1.0, rows / cols if pattern.ndim == 2 else cols / rows) ** 0.5
        if group["beta2"] is not None:
            moments = [local(self.state[p]["second_moment"]) for p in params]
            u_Nrc = even_out(u_Nrc, moments, group["beta2"], pattern, finite)
        lr = group["lr"]
        decay = lr * _decoupled(group) * (gain if group["decay"] == "scaled" else 1.0)
        updates = u_Nrc.view(len(params), *local(pattern).shape).unbind()
        kept = finite.to(u_Nrc.dtype)
        for p, u in zip(map(local, params), updates, strict=True):
            if decay:
                decayed = p * (u * p > 0) if group["cautious"] else p
                p.addcmul_(decayed, kept, value=-decay)
            p.addcmul_(u, kept, value=-lr * gain)


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [local(p.grad) for p in params if p.grad is not None]


def _widened(t: Tensor) -> Tensor:
    """Return the same tensor, or a copy in fp32 of a narrower one."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _decoupled(group: dict[str, Any]) -> float:
    """Return the weight decay of a group that is not added to its gradients."""
    return 0.0 if group["decay"] == "l2" else group["weight_decay"]


class LowBitAdamW(Optimizer):
    """AdamW by ``torchao.optim.AdamW8bit``.

    A moment is stored in blocks of 256 values, as codes into a fixed table of values and one fp32 scale a
    block (Dettmers et al., arXiv:2110.02861). An update reads it into fp32, computes there, and quantizes it
    again. This saves 6 bytes a parameter compared with fp32 moments.

    A block lies within one row of a parameter (within one matrix of a stack), so any number of processes can
    share the rows. A row that is not a multiple of 256 values has smaller blocks. Moments of fewer than 4,096
    values, or with blocks of fewer than 32, stay fp32.

    Torchao compiles its update for each shape of parameter, which takes 15 to 25 seconds on a CPU. It is
    therefore ``compiled`` only if the model is.
    """

    def __init__(self, groups: list[dict[str, Any]], *, compiled: bool = False) -> None:
        with quiet_torchao():
            from torchao.optim import AdamW8bit
        self.param_groups = groups
        self.compiled = compiled
        self.set_lr(1.0)
        # Torchao's optimizer gets this process's slice of each parameter.
        self._slices = {p: nn.Parameter(local(p.detach())) for group in groups for p in group["params"]}
        inner = [{**group, "params": [self._slices[p] for p in group["params"]]} for group in groups]
        self._inner = AdamW8bit(inner, bf16_stochastic_round=True)  # fp32 weights are not rounded
        for p, slice_ in self._slices.items():
            # Torchao creates the state in its first step, but a checkpoint is loaded before.
            self._inner.state[slice_] = {
                "step": torch.tensor(0.0),
                "exp_avg": self._moment(p, signed=True),
                "exp_avg_sq": self._moment(p, signed=False),
            }

    def _moment(self, p: Tensor, *, signed: bool) -> Tensor:
        block = math.gcd(p.numel() // p.shape[0], self._inner.block_size)
        if p.numel() < _SMALLEST_MOMENT or block < _SMALLEST_BLOCK:
            return torch.zeros_like(local(p), dtype=torch.float32)
        moment: Tensor = self._inner._subclass_zeros(local(p), signed, block)
        return moment

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the live state as plain tensors, named ``{parameter name}.{state name}``.

        A quantized moment has several: ``{parameter name}.{state name}.8bit.{codes, scale or qmap}``.
        """
        named: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            state = self._inner.state[self._slices[p]] if p in self._slices else {}
            for key, value in state.items():
                named |= {f"{name}.{key}{suffix}": part for suffix, part in self._parts(p, value)}
        return named

    def _parts(self, p: Tensor, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        if not hasattr(value, "__tensor_flatten__"):  # not quantized
            yield "", dtensor_like(value, p) if value.ndim else value
            return
        parts, _ = value.__tensor_flatten__()
        for part in parts:
            tensor: Tensor = getattr(value, part)
            if part != "qmap":  # codes and scales are sharded by the parameter's rows
                rows = len(local(p))
                tensor = dtensor_like(tensor.view(rows, tensor.numel() // max(1, rows)), p)
            yield f".8bit.{part}", tensor

    def step(self, finite: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Update the parameters as `Optimizer.step` does. Torchao cannot skip an update on the device, so the
        host waits for ``finite``."""
        if finite is not None and not finite.item():
            return
        if factor is not None:
            torch._foreach_mul_(_gradients(self._parameters()), factor)
        self.add_decay_to_gradients()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"].fill_(group["lr"])
            # A tensor, because another number would compile the update again.
            inner["weight_decay"] = torch.tensor(_decoupled(group), dtype=torch.float32)
        for p, slice_ in self._slices.items():
            slice_.data = local(p.detach())
            slice_.grad = None if p.grad is None or not slice_.numel() else local(p.grad)
        with contextlib.nullcontext() if self.compiled else torch.compiler.set_stance("force_eager"):
            self._inner.step()
        for slice_ in self._slices.values():
            slice_.grad = None


def group_settings(
    model: Model, config: OptimizerConfig, lr: float, compute: torch.dtype = torch.float32
) -> list[dict[str, Any]]:
    """Return the groups of all trainable parameters with their settings.

    They are those of `Model.parameter_groups` and ``optimizer.groups``. The arguments are those of
    `build_optimizer`.
    """
    group_of = model.parameter_groups()
    members: dict[ParameterGroup, list[Tensor]] = defaultdict(list)
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert 0 < group_of[name].rate < math.inf, f"parameter {name} has the rate {group_of[name].rate}"
            members[group_of[name]].append(p)
    groups: list[dict[str, Any]] = []
    for group, params in members.items():
        own = config.groups.get(group.name, GroupConfig())
        muon = group.role == "matrix" and config.kind == "muon"
        decayed = group.role == "matrix"
        peak_lr = group.rate * (lr * config.muon_lr_ratio if muon else lr)
        if own.lr_ratio is not None:
            peak_lr = lr * own.lr_ratio
        if own.width_exponent and model.config.WIDTH:
            peak_lr *= (getattr(model.config, model.config.WIDTH) / _BASE_WIDTH) ** own.width_exponent
        weight_decay = config.weight_decay if decayed else 0.0
        if own.weight_decay is not None:
            weight_decay, decayed = own.weight_decay, False  # no schedule changes it
        settings = {
            "params": params,
            "name": group.name,
            "muon": muon,
            "peak_lr": peak_lr,
            "decayed": decayed,
            "weight_decay": weight_decay,
            "decay": own.decay,
            "momentum": config.muon_momentum,
            "beta2": config.muon_beta2,
            "rows": config.muon_rows,
            "cautious": config.cautious_decay,
            "compute": compute,
            "betas": own.betas or config.betas,
            "eps": config.eps,
        }
        groups.append(settings)
    return sorted(groups, key=lambda one: (one["muon"], one["decayed"], one["peak_lr"]))


def build_optimizer(
    model: Model,
    config: OptimizerConfig,
    lr: float,
    compute: torch.dtype = torch.float32,
    *,
    compiled: bool = False,
    world: World = ALONE,
) -> Optimizer:
    """Build the optimizer of every trainable parameter, in the groups of `group_settings`.

    Args:
        lr: learning rate of AdamW at rate 1; schedules and logs show this one.
        compute: dtype of Muon's matrix products, which the processes of ``world`` share.
        compiled: compile the update, where it is torchao's.
    """
    groups = group_settings(model, config, lr, compute)
    if config.kind == "adamw8bit":
        return LowBitAdamW(groups, compiled=compiled)
    return Optimizer(groups, world)


def narrow_weights(model: Model, config: OptimizerConfig) -> None:
    """Convert the parameters of groups with ``weights: bf16`` in place. Call it before `build_optimizer`."""
    groups = model.parameter_groups() if config.narrow else {}
    for name, p in model.named_parameters():
        if name in groups and groups[name].name in config.narrow:
            p.data = p.data.to(torch.bfloat16)


#: Lower bound of a mean square, so that a division never amplifies noise.
_SMALLEST_SQUARE = 1e-10


def _shorter(shape: torch.Size) -> int:
    """Return the axis that the mean runs over, -1 or -2; for a square matrix the axis of the inputs."""
    rows, cols = shape[-2:]
    return -1 if rows > cols or (rows == cols and len(shape) == 2) else -2


def no_moment(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the initial second moment of a matrix or a stack of matrices: zeros along the longer side.

    It is sharded as the parameter is. The columns of a linear map are never sharded.
    """
    if _shorter(p.shape) == -1:
        return dtensor_like(torch.zeros_like(local(p)[..., :1], dtype=dtype), p)
    if p.ndim == 3:
        return dtensor_like(torch.zeros_like(local(p)[:, :1], dtype=dtype), p)
    return torch.zeros(1, p.shape[1], dtype=dtype, device=p.device)


def even_out(u_Nrc: Tensor, moments: list[Tensor], beta2: float, pattern: Tensor, finite: Tensor) -> Tensor:
    """Update the second moments with the polar factors, and return the factors normalised by them.

    Args:
        u_Nrc: polar factors of N matrices, or this process's rows of them; each keeps its Frobenius norm.
        moments: second moment of each parameter.
        beta2: decay of the running mean.
        pattern: one of the parameters; all are sharded as it is.
        finite: scalar bool; the moments stay as they are where it is False.
    """
    axis = _shorter(pattern.shape)
    splits_matrices = pattern.ndim == 2  # if it is sharded at all; a stack is sharded between its matrices
    squares = u_Nrc.square().sum(axis, keepdim=True)
    if splits_matrices and axis == -2:
        sum_over_slices(squares, pattern)
    means = (squares / pattern.shape[axis]).view(len(moments), *moments[0].shape).unbind()
    kept = [torch.where(finite, mean, moment) for mean, moment in zip(means, moments, strict=True)]
    torch._foreach_lerp_(moments, kept, 1 - beta2)
    scale = torch.stack(moments).view_as(squares).clamp_min(_SMALLEST_SQUARE).rsqrt()
    norms = torch.stack([squares.sum((-2, -1)), (squares * scale.square()).sum((-2, -1))])
    if splits_matrices and axis == -1:
        sum_over_slices(norms, pattern)
    before_N, after_N = norms
    rescale_N11 = (before_N / after_N.clamp_min(_SMALLEST_SQUARE)).sqrt()[:, None, None]
    return u_Nrc * (scale * rescale_N11)
