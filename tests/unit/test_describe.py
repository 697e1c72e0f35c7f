import json
import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from spider.config import Config, ConfigError, load_config
from spider.describe import activation_bytes, describe, quantity, render
from spider.model import build_model
from spider.training.optim import build_optimizer


def configuration(model="tiny", stages=None, **run) -> Config:
    stages = stages or [
        {"name": "main", "tokens": 1_000_000},
        {"name": "anneal", "max_steps": 50, "n_loops": 4},
    ]
    return load_config(
        {
            "datasets": {"d": {"source": {"kind": "pydocs"}, "validation": 0.1}},
            "runs": {
                "r": {
                    "data": "d",
                    "model": model,
                    "stages": stages,
                    "defaults": {"seq_len": 128, "micro_batch": 4},
                    **run,
                }
            },
        }
    )


def test_counts_are_those_of_the_model_and_of_the_stages():
    config = configuration()
    found = describe(config, "r")
    model = build_model(config.run("r").model)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert sum(found["parameters_by_part"].values()) == found["parameters"]
    main, anneal = found["stages"]
    assert (main["steps"], main["tokens_per_step"], main["bytes"]) == (1953, 512, 1953 * 512)
    assert (anneal["steps"], anneal["n_loops"]) == (50, 4)
    assert anneal["flops_per_byte"] > main["flops_per_byte"] == model.flops_per_token(128)
    assert found["bytes"] == main["bytes"] + anneal["bytes"]
    assert found["flops"] == pytest.approx(sum(s["flops_per_byte"] * s["bytes"] for s in found["stages"]))
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weights_gradients_and_optimizer_state_are_exact(kind):
    config = configuration(optimizer={"kind": kind})
    memory = describe(config, "r")["stages"][0]["memory"]
    model = build_model(config.run("r").model)
    optimizer = build_optimizer(model, config.run("r").optimizer, 1e-3)
    held = [t for values in optimizer.state.values() for t in values.values()]
    assert memory["gradients"] == 4 * found_parameters(model)
    assert memory["optimizer"] == sum(t.numel() * t.element_size() for t in held)
    assert memory["total"] == sum(v for k, v in memory.items() if k != "total")


def found_parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


def kept_by_forward(config: Config, autocast: bool) -> int:
    """Bytes that a real forward pass of the first stage keeps for the backward pass, weights apart."""
    spec = config.stage("r", "main")
    model = build_model(spec.model).train()
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return t

    tokens_BT = torch.randint(0, 256, (spec.settings.micro_batch, spec.settings.seq_len))
    with saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(tokens_BT, tokens_BT, n_loops=spec.settings.n_loops)
    assert math.isfinite(output.loss.item())
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("hidden,loops", [(192, 2), (320, 5)])
def test_the_estimate_of_activations_is_near_what_a_forward_pass_keeps(
    hidden, loops, precision, checkpointing
):
    model = {"preset": "tiny", "hidden": hidden, "recurrence": {"checkpointing": checkpointing}}
    config = configuration(
        model, precision=precision, defaults={"seq_len": 128, "micro_batch": 6, "n_loops": loops}
    )
    memory = describe(config, "r")["stages"][0]["memory"]
    estimate = memory["activations"] + memory.get("autocast_copies", 0)
    # Under checkpointing the estimate also holds the layer that the backward pass recomputes.
    kept = kept_by_forward(config, precision == "bf16")
    assert 0.85 < estimate / kept < (1.35 if checkpointing else 1.15)


def test_auto_is_counted_by_whether_the_run_asks_for_a_gpu():
    assert describe(configuration(), "r")["counted_as"] == "fp32"
    found = describe(configuration(resources={"gpus": 1}), "r")
    assert found["counted_as"] == "bf16" and "autocast_copies" in found["stages"][0]["memory"]
    spec = configuration().stage("r", "main")
    assert activation_bytes(spec, narrow=True) < activation_bytes(spec, narrow=False)


def test_a_billion_parameters_are_described_without_being_made():
    found = describe(configuration("spider-1b"), "r")
    assert 0.9e9 < found["parameters"] < 1.1e9
    assert found["memory"] > 16 * 0.9e9


def test_an_unknown_run_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="no run 'q'"):
        describe(configuration(), "q")


def test_the_table_shows_parts_stages_and_totals(capsys):
    found = describe(configuration(), "r")
    render(found)
    shown = capsys.readouterr().out
    for needed in ("routed experts", "main", "anneal", "1,953", f"{found['parameters']:,}", "FLOP in all"):
        assert needed in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_quantities_have_three_figures():
    values = [0, 512, 999.6, 3_200_000, 12_345, 1.5e21]
    assert [quantity(v, "B") for v in values] == ["0 B", "512 B", "1.00 kB", "3.20 MB", "12.3 kB", "1.50 ZB"]
