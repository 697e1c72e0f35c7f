"""Compare the whole model by kernels with the same model in torch."""

from __future__ import annotations

import pytest
import torch

from kernels.switch import choose
from tests.unit.model.small import build


@pytest.mark.interpreter
def test_kernels_give_the_loss_and_the_gradients_that_torch_gives():
    """They agree within 1e-4, with every part on and some rows of the batch not valid."""
    model = build(engram={"byte_orders": [2]}).train()
    tokens_BT = torch.randint(97, 123, (2, 25), generator=torch.Generator().manual_seed(0))
    tokens_BT[1, 3:20] = 97

    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)  # the noise of boundaries
        loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:]).loss
        return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

    by_kernels, load = results(), model.core.layers[0].ffn.load.clone()
    choose("torch")
    model.core.layers[0].ffn.load.zero_()
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, got, want in zip(names, by_kernels, results(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(load, model.core.layers[0].ffn.load) and load.sum() > 0
