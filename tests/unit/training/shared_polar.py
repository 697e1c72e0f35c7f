"""Train a small net as one of the processes that `torchrun` starts for `test_shared_polar`.

    torchrun --nproc-per-node N shared_polar.py FOLDER

For each of `WAYS` process r of N leaves ``{way}-{ddp or fsdp}-{r}.pt``: ``computed``, the number of polar
factors that it computed in each step, ``weights`` and the optimizer's ``state``, whole, after all steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spider.config import OptimizerConfig
from spider.model.interface import Model
from spider.processes.parallel import full_tensor, replicate, shard
from spider.processes.world import ALONE, World, join
from spider.training import optim

STEPS, SAMPLES = 5, 240
#: The net of this way is a single matrix.
LONE = "lone"
WAYS: dict[str, dict[str, Any]] = {"evened": {"muon_beta2": 0.9}, "rows": {"muon_rows": True}, LONE: {}}


class Net(Model):
    """A net of 18 matrices of seven shapes, most of them odd in number; one matrix is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.ModuleList(nn.Linear(13, 13) for _ in range(5))
        self.up = nn.ModuleList(nn.Linear(13, 40) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(40, 13, bias=False) for _ in range(3))
        self.experts_EDH = nn.Parameter(torch.randn(3, 13, 8) / 4)
        self.back_EHD = nn.Parameter(torch.randn(3, 8, 13) / 4)
        self.head = nn.Linear(13, 16)
        self.never = nn.Parameter(torch.ones(4, 4))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.square:
            x_BD = x_BD + torch.tanh(layer(x_BD))
        for up, down in zip(self.up, self.down, strict=True):
            x_BD = x_BD + down(torch.tanh(up(x_BD)))
        h_BEH = torch.tanh(torch.einsum("bd,edh->beh", x_BD, self.experts_EDH))
        return self.head(x_BD + torch.einsum("beh,ehd->bd", h_BEH, self.back_EHD))


class Lone(Model):
    """A single matrix with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(13, 16)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.line(x_BD)


def train(way: str, kind: str, world: World = ALONE) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Lone() if way == LONE else Net()
    if isinstance(net, Net):
        net.never.requires_grad_(kind == "fsdp")  # DDP wants a gradient of what may have one
    called: nn.Module = net
    if world.size > 1 and kind == "fsdp":
        shard(net, world)
    elif world.size > 1:
        called = replicate(net, world)
    config = OptimizerConfig(kind="muon", weight_decay=0.1, **WAYS[way])
    optimizer = optim.build_optimizer(net, config, 1e-3, world=world)
    computed = [0] * STEPS
    polar = optim.polar

    def counted(u_Nrc: Tensor) -> Tensor:
        computed[step] += len(u_Nrc)
        return polar(u_Nrc)

    patch = pytest.MonkeyPatch()
    patch.setattr(optim, "polar", counted)
    for step in range(STEPS):
        drawn_BD = torch.randn(SAMPLES, 13 + 16, generator=torch.Generator().manual_seed(step))
        x_BD, y_BV = drawn_BD.chunk(world.size)[world.rank].split([13, 16], 1)
        (called(x_BD) - y_BV).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    patch.undo()
    return {
        "computed": computed,
        "weights": {name: full_tensor(p.detach()) for name, p in net.named_parameters()},
        "state": {name: full_tensor(t) for name, t in optimizer.tensors(net).items()},
    }


def main() -> None:
    torch.set_num_threads(1)
    with join() as world:
        for way in WAYS:
            for kind in ("ddp", "fsdp"):
                torch.save(train(way, kind, world), Path(sys.argv[1]) / f"{way}-{kind}-{world.rank}.pt")


if __name__ == "__main__":
    main()
