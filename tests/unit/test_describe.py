import json
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from spider.common.results import Results
from spider.config import Config, load_config
from spider.model import build_model
from spider.model import layers as parts
from spider.model.spider.config import SpiderConfig
from spider.training.optim import build_optimizer, narrow_weights
from spider.workflow.describe import describe, quantity, render
from tests.unit.small_datasets import shards_of_ids

ROOT = Path(__file__).parents[2]
NARROW = {"matrices": {"weights": "bf16"}}
PRESETS, TRAINING = ROOT / "presets", ROOT / "docs/training.md"


def configuration(model="tiny", stages=None, **run) -> Config:
    stages = stages or [
        {"name": "main", "tokens": 1_000_000},
        {"name": "anneal", "max_steps": 50, "n_loops": 4},
    ]
    defaults = {"seq_len": 128, "micro_batch": 4}
    written = {"data": "d", "model": model, "stages": stages, "defaults": defaults, **run}
    datasets = {name: {"source": {"kind": "pydocs"}, "validation": 0.1} for name in "de"}
    return load_config({"datasets": datasets, "runs": {"r": written}})


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


def test_parameters_are_counted_by_three_conventions_with_the_tokens_for_each(capsys):
    stages = [{"name": "main", "tokens_per_parameter": 10.5}]
    found = describe(configuration("gpt-d12", stages), "r")
    parts, counts = found["parameters_by_part"], found["parameters_by_convention"]
    both = parts["matrices"] + parts["head"]
    assert counts == {"all": found["parameters"], "matrices and head": both, "matrices": parts["matrices"]}
    render(found)
    said = " ".join(capsys.readouterr().out.split())
    assert f"all {counts['all']:,} (10.3), matrices and head {both:,} (10.5), matrices" in said
    spider = describe(configuration("spider-1b", stages), "r")
    multiplied = spider["parameters_by_convention"]
    assert multiplied["matrices and head"] - multiplied["matrices"] == 272 * 2048


def test_the_exchange_of_a_step_is_estimated_for_several_gpus(capsys):
    stages = [{"name": "main", "max_steps": 5, "windows_per_step": 24, "micro_batch": 1}]
    blocks = {"resources": {"gpus": 1}, "optimizer": {"kind": "muon"}, "precision": "bf16"}
    replicas, shards = (
        describe(configuration("gpt-d12", stages, parallel=how, **blocks), "r") for how in ("ddp", "fsdp")
    )
    total, matrices = replicas["parameters"], replicas["parameters_by_part"]["matrices"]
    one, two, four, eight = replicas["exchange"]
    assert [row["gpus"] for row in replicas["exchange"]] == [1, 2, 4, 8], "16 cannot share 24 windows"
    assert one["sent"] == one["NVLink"] == 0 and eight["windows"] == 3
    assert eight["arithmetic"] == pytest.approx(one["arithmetic"] / 8)
    assert four["sent"] == pytest.approx(0.75 * (8 * total + 2 * matrices))
    assert two["Ethernet"] == pytest.approx(two["sent"] / 12.5e9)
    # A unit's weights are gathered twice in bf16, which is as much as once in fp32.
    sharded = shards["exchange"][2]
    assert sharded["sent"] == pytest.approx(0.75 * (4 * total * 2 * 6 + 4 * matrices / 4))
    render(replicas)
    said = " ".join(capsys.readouterr().out.split())
    assert "! marks an exchange of more than a quarter" in said and "8 3" in said and "! " in said
    assert describe(configuration(), "r")["exchange"] == []


def test_switches_of_a_mixture_are_shown_at_their_samples(tmp_path, capsys):
    mix = {"mix": {"d": 3, "e": 1}, "switches": {100: {"d": 1, "e": 1}}}
    config = configuration(stages=[{"name": "main", "max_steps": 50, "data": mix}])
    for name, tokens in (("d", 128 * 60), ("e", 128 * 20)):
        shards_of_ids(Results(tmp_path).shards(name), [np.full(tokens, 65, "<u2")])
    described = describe(config.model_copy(update={"results": str(tmp_path)}), "r")
    d, e = described["stages"][0]["sources"]
    # 25 of the first 100 samples are e's, and every second one of the others.
    assert [d["samples"], e["samples"], d["epochs"], e["epochs"]] == [125, 75, 125 / 60, 75 / 20]
    assert d["shares"] == [(0, 0.75), (100, 0.5)] and e["shares"] == [(0, 0.25), (100, 0.5)]
    render(described)
    shown = " ".join(capsys.readouterr().out.split())
    assert "main e 0.25, 0.5 from 100 75 9.60 kB 3.75" in shown


def allocated(tensors) -> int:
    """Return the bytes of storage behind tensors; the parts of a quantized tensor count."""
    parts = []
    for t in tensors:
        names = t.__tensor_flatten__()[0] if hasattr(t, "__tensor_flatten__") else None
        parts += [getattr(t, name) for name in names] if names else [t]
    return sum(part.untyped_storage().nbytes() for part in parts)


@pytest.mark.parametrize(
    "optimizer",
    [{"kind": "adamw"}, {"kind": "muon", "muon_beta2": 0.95}, {"kind": "adamw8bit", "groups": NARROW}],
)
def test_weights_gradients_and_optimizer_state_are_exact(optimizer):
    config = configuration(optimizer=optimizer, precision="bf16")
    memory = describe(config, "r")["stages"][0]["memory"]
    model = build_model(config.run("r").model)
    narrow_weights(model, config.run("r").optimizer)
    optimizer = build_optimizer(model, config.run("r").optimizer, 1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert memory["weights"] == allocated([*model.parameters(), *model.buffers()])
    assert memory["gradients"] == allocated(p.grad for p in model.parameters())
    assert memory["optimizer"] == allocated(optimizer.tensors(model).values())
    assert memory["total"] == sum(v for k, v in memory.items() if k != "total")


def test_the_table_of_groups_is_what_the_optimizer_is_built_from(capsys):
    config = configuration(
        {"family": "gpt", "depth": 4, "windows": "L"},
        [{"name": "main", "max_steps": 2, "lr": 0.004}],
        optimizer={"preset": "nanochat", "groups": {"vectors": {"weight_decay": 0.3}}},
    )
    found = describe(config, "r")
    model = build_model(config.run("r").model)
    built = build_optimizer(model, config.run("r").optimizer, 0.004).param_groups
    assert [row["group"] for row in found["groups"]] == [group["name"] for group in built]
    assert sum(row["parameters"] for row in found["groups"]) == found["parameters"]
    rows = {row["group"]: row for row in found["groups"]}
    rates = {name: row["lr"] for name, row in rows.items()}
    wide = 3**0.5  # 768 over 256, to the power of one half
    plain = {"head": 0.004 * wide, "embedding": 0.3 * wide, "value_embeddings": 0.3 * wide}
    assert rates == pytest.approx(plain | {"residual": 0.005, "x0": 0.5, "matrices": 0.02})
    assert rows["x0"]["betas"] == [0.96, 0.95] and rows["head"]["eps"] == 1e-10
    assert (rows["matrices"]["update"], rows["matrices"]["betas"]) == ("muon", [0.95, 0.95])
    render(found)
    assert "0.2 scaled" in capsys.readouterr().out


def test_limits_in_flops_and_bytes_a_parameter_are_resolved_and_hours_are_left_open(capsys):
    stages = [
        {"name": "main", "target_flops": 1e12},
        {"name": "more", "tokens_per_parameter": 0.5},
        {"name": "last", "max_hours": 2, "schedule": "wsd"},
    ]
    found = describe(configuration(stages=stages), "r")
    by_flops, by_size, by_clock = found["stages"]
    a_step = by_flops["flops_per_byte"] * 512
    assert by_flops["steps"] == 1e12 // a_step and by_flops["flops"] <= 1e12 < by_flops["flops"] + a_step
    assert by_size["steps"] == found["parameters"] // 2 // 512
    assert by_clock["steps"] is by_clock["bytes"] is by_clock["flops"] is None
    assert found["steps"] is found["bytes"] is found["flops"] is None
    assert json.loads(json.dumps(found)) == found
    render(found)
    assert "2 h" in capsys.readouterr().out


def kept_by_forward(config: Config, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> int:
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

    def policy(context, op, *given, **options):
        if (chosen := choose(context, op, *given, **options)) is CheckpointPolicy.MUST_SAVE:
            tree_map_only(torch.Tensor, pack, context.op_output)
        return chosen

    choose = parts._policy
    monkeypatch.setattr(parts, "_policy", policy)
    tokens_BT = torch.randint(0, 256, (spec.settings.micro_batch, spec.settings.seq_len))
    static = mock.patch("spider.model.spider.chunking.shapes_are_static", lambda x, training: True)
    narrow = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with static, saved_tensors_hooks(pack, lambda t: t), narrow:
        output = model(tokens_BT, tokens_BT, n_loops=spec.settings.n_loops)
    assert math.isfinite(output.loss.item())
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("precision", "checkpointing"), [("fp32", False), ("bf16", "selective")])
def test_the_estimate_of_activations_is_near_what_a_forward_pass_keeps(precision, checkpointing, monkeypatch):
    model = {"preset": "tiny", "recurrence": {"checkpointing": checkpointing}}
    defaults = {"seq_len": 128, "micro_batch": 6, "n_loops": 3}
    config = configuration(model, precision=precision, defaults=defaults)
    memory = describe(config, "r")["stages"][0]["memory"]
    estimate = memory["activations"] + (memory.get("autocast_copies", 0) if checkpointing is not True else 0)
    # The estimate also holds the layer that the backward pass recomputes.
    most = 1.6 if checkpointing else 1.15
    assert 0.85 < estimate / kept_by_forward(config, precision == "bf16", monkeypatch) < most


@pytest.mark.parametrize(
    ("length", "changes"),
    [(64, {}), (256, {"qk_gain": 5.0, "residual_mix": "none", "heads": 4, "kv_heads": 2})],
)
def test_the_estimate_of_a_gpts_activations_is_near_what_a_forward_pass_keeps(length, changes, monkeypatch):
    model = {"preset": "gpt-cpu", "hidden": 192, **changes}
    stages = [{"name": "main", "max_steps": 2}]
    defaults = {"seq_len": length, "micro_batch": 6}
    config = configuration(model, precision="fp32", defaults=defaults, stages=stages)
    estimate = describe(config, "r")["stages"][0]["memory"]["activations"]
    assert 0.96 < estimate / kept_by_forward(config, False, monkeypatch) < 1


@pytest.mark.parametrize(
    "stream, checkpointing, traced",
    # GB that the step of spider-1b, 112 windows of 256 bytes and 6 loops, keeps besides copies of weights, as
    # torch's compiler traced it for an H100 (docs/LOG.md).
    [
        ("wide", False, 32.69),
        ("narrow", True, 9.68),
        ("narrow", "selective", 17.14),
        ("narrow", "full", 3.41),
    ],
)
def test_the_estimate_of_a_compiled_pass_is_near_what_its_trace_keeps(stream, checkpointing, traced):
    block = {"stream": stream, "boundary": {"spare": 0.05}, "recurrence": {"checkpointing": checkpointing}}
    with torch.device("meta"):
        model = build_model(SpiderConfig.model_validate(block))
    estimate = model.activation_bytes(112, 256, 6, narrow=True, compiled=True) / 1e9
    # With "full" little is kept beside the layer that the backward pass recomputes, which has no trace.
    assert 0.95 < estimate / traced < (1.5 if checkpointing == "full" else 1.05)


def test_auto_is_counted_by_whether_the_run_asks_for_a_gpu():
    assert describe(configuration(), "r")["counted_as"] == "fp32"
    found = describe(configuration(resources={"gpus": 1}), "r")
    assert found["counted_as"] == "bf16, compiled" and "autocast_copies" in found["stages"][0]["memory"]
    narrow, wide = (describe(configuration(precision=p), "r")["stages"][0] for p in ("bf16", "fp32"))
    assert narrow["memory"]["activations"] < wide["memory"]["activations"]


#: Memory of the GPU that a preset is for. `describe` may count nine tenths. The rest is left for temporaries,
#: and for the error of the estimate.
IN_THE_TABLE = {"spider-1b": 80e9, "spider-1b-25gb": 25e9, "spider-400m": 24e9, "spider-150m": 8e9}
WHOLE_RUNS = ("gpt-d12", "gpt-d20", "golf-16mb", "golf-seed", "spider-seed", "ladder-gpt", "miniseries-gpt")
ON_GPUS = IN_THE_TABLE | dict.fromkeys(WHOLE_RUNS, 80e9)


def test_every_preset_for_gpus_is_checked():
    configurations = {path.stem: load_config(path) for path in PRESETS.glob("*.yaml")}
    runs = [(name, run) for name, config in configurations.items() for run in config.runs.values()]
    assert {name for name, run in runs if run.resources.gpus} == set(ON_GPUS)


@pytest.mark.parametrize("preset", IN_THE_TABLE)
def test_the_table_of_presets_for_gpus_shows_what_describe_counts(preset):
    found = describe(load_config(PRESETS / f"{preset}.yaml"), preset, int(ON_GPUS[preset]))
    (row,) = (line for line in TRAINING.read_text().splitlines() if f"[`presets/{preset}.yaml`]" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    units = {"parameters": "", "tokens": "B", "memory": "B"}
    size, read, needs = (quantity(found[key], unit) for key, unit in units.items())
    assert cells[1:3] == [size.replace(" ", ""), read] and cells[4] == needs
    (last,) = found["stages"][-1:]
    way = last["checkpointing"] or "none"
    assert cells[5] == f"{last['micro_batch']} windows, `{way}`"


@pytest.mark.parametrize("gpus", [1, 16])
@pytest.mark.parametrize("preset", ON_GPUS)
def test_presets_for_gpus_fit_on_1_and_on_16_of_them(preset, gpus):
    plain = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())
    (block,) = (plain.get("runs") or plain["ladders"]).values()
    block["resources"] |= {"gpus": gpus}
    config = load_config(plain)
    name = list(config.runs)[-1]  # of a sweep, the largest model
    found = describe(config, name, int(ON_GPUS[preset]))
    assert found["counted_as"] == "bf16, compiled" and found["memory"] < 0.9 * ON_GPUS[preset]
    for stage in config.runs[name].stages:
        spec = config.stage(name, stage.name)
        assert spec.processes == gpus and spec.windows_per_step % (gpus * spec.micro_batch(gpus)) == 0


def test_quantities_have_three_figures():
    values = [0, 512, 999.6, 3_200_000, 12_345, 1.5e21]
    assert [quantity(v, "B") for v in values] == ["0 B", "512 B", "1.00 kB", "3.20 MB", "12.3 kB", "1.50 ZB"]


def test_a_process_holds_its_share_under_fsdp_and_gathers_units():
    stages = [{"name": "main", "max_steps": 5, "windows_per_step": 2, "micro_batch": 2}]
    alone = describe(configuration("gpt-d12", stages), "r")
    two = {"resources": {"processes": 2}, "parallel": "fsdp"}
    shared = describe(configuration("gpt-d12", stages, **two), "r")["stages"][0]["memory"]
    parts, alone = alone["parameters_by_part"], alone["stages"][0]["memory"]
    for name in ("weights", "gradients", "optimizer"):
        assert shared[name] == alone[name] // 2
    layers = (parts["matrices"] + parts["value_embeddings"]) / 12
    outside = 8 * (parts["embedding"] + parts["head"])
    # Two layers and a gradient of one, and its copy; every other layer has value embeddings.
    assert outside + 16 * layers < shared["gathered"] < outside + 1.5 * 16 * layers
    copies = describe(configuration("gpt-d12", stages, **{**two, "parallel": "ddp"}), "r")["stages"][0][
        "memory"
    ]
    assert copies["optimizer"] == alone["optimizer"] and copies["activations"] < alone["activations"]
