"""Test the GPT: counts, equations against other implementations, causality and gradients of each switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from small_gpt import SWITCHES, build_gpt, config_of, text
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spider.config import merged
from spider.model import build_model
from spider.model.gpt import model as gpt
from spider.model.gpt.config import PRESETS, GPTConfig
from spider.model.gpt.model import GPT
from spider.model.layers import NORM_EPS
from spider.tokens import IGNORED
from spider.training.compilation import compile_forward
from spider.training.precision import eligible

PLAIN = SWITCHES["plain"]
#: A compiler that keeps for the backward pass what Inductor keeps, and generates no code.
KEEPING = aot_autograd(
    fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
    bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
    partition_fn=min_cut_rematerialization_partition,
    decompositions=select_decomp_table(),
)


def on_meta(**block: Any) -> GPT:
    with torch.device("meta"):
        model = build_model(GPTConfig(family="gpt", **block))
    assert isinstance(model, GPT)
    return model


# ------------------------------------------------------------------------------------------------ the counts


@pytest.mark.parametrize(
    ("preset", "count"),
    [("gpt-d12", 286_262_424), ("gpt-d20", 896_535_720), ("gpt-d24", 1_384_124_976)],
)
def test_parameters_of_the_presets(preset, count):
    model = on_meta(vocab_size=32_768, **PRESETS[preset])
    parts = model.parameters_by_part()
    assert model.num_parameters() == sum(parts.values()) == count
    assert model.scaling_parameters() == parts["matrices"] + parts["head"]
    assert model.looked_up() == parts["embedding"] + parts["value_embeddings"]
    if preset == "gpt-d12":
        sizes = [25_165_824, 150_994_944, 25_165_824, 84_935_808, 24]
        names = ["embedding", "value_embeddings", "head", "matrices", "scalars"]
        assert parts == dict(zip(names, sizes, strict=True))


def test_flops_of_d24_are_those_of_nanochats_leaderboard():
    model = on_meta(vocab_size=32_768, **PRESETS["gpt-d24"])
    assert model.flops_per_token(2048) == 4_945_112_064
    assert model.flops_per_token(2048) * 16_704 * 524_288 == 4.330784131228946e19


@pytest.mark.parametrize(
    ("size", "preset", "block", "count"),
    [
        (8192, "golf-16mb", {}, 35_944_536),
        (8192, "golf-16mb", {"recurrence": {"layers": [4, 5]}}, 35_943_512),
        (8192, "golf-seed", {}, 25_175_076),
        (2048, "golf-tiny", {}, 1_346_584),
    ],
)
def test_parameters_of_the_golfs_sizes(size, preset, block, count):
    model = on_meta(vocab_size=size, **merged(PRESETS[preset], block))
    assert model.num_parameters() == count
    assert model.looked_up() == 0 and model.scaling_parameters() > 0.99 * count


@pytest.mark.parametrize("switch", SWITCHES)
def test_gpt_flops_per_token_agree_with_the_flop_counter(switch):
    model, x = build_gpt(**merged(SWITCHES[switch], {"windows": "L"})), text(2, 128)
    # The counter ignores the CPU's fused attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(x)
    counted = 3 * counter.get_total_flops() / x.numel()
    assert model.flops_per_token(128) == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize(
    ("switch", "narrow", "compiled"),
    [("looped", False, False), ("nanochat", True, False), ("golf", True, False), ("nanochat", True, True)],
)
def test_activations_are_estimated_within_a_fifth(switch, narrow, compiled):
    """Compare the estimate with what a forward pass keeps, without weights and their copies.

    The window is longer than those for which a CPU computes attention by plain products in bf16.
    """
    changes = {"windows": "L", **({"vocab_size": 5000} if compiled else {})}
    model, x = build_gpt(hidden=64, **merged(SWITCHES[switch], changes)), text(1, 640)
    if compiled:
        torch.compiler.reset()
        compile_forward(model, backend=KEEPING)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in own and saved.numel() >= x.numel():
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=narrow),
    ):
        output = model(x, x)
    estimate = model.activation_bytes(1, 640, None, narrow=narrow, compiled=compiled)
    assert output.loss is not None
    assert estimate == pytest.approx(sum(kept.values()), rel=0.2)


# --------------------------------------------------------------------------------------------- the equations


@pytest.mark.parametrize("groups", [4, 2])
def test_logits_are_those_of_transformers(groups):
    """Its rotation is by -theta, so the halves of each head of q and k are swapped."""
    nanochat = pytest.importorskip("transformers.models.nanochat")
    model, x = build_gpt(**{**PLAIN, "softcap": 15.0, "kv_heads": groups}).eval(), text(2, 40)
    c = model.config
    other = nanochat.modeling_nanochat.NanoChatForCausalLM(
        nanochat.configuration_nanochat.NanoChatConfig(
            **{"vocab_size": 272, "hidden_size": c.hidden, "intermediate_size": 4 * c.hidden},
            **{"num_hidden_layers": c.layers, "num_attention_heads": c.heads, "rms_norm_eps": NORM_EPS},
            **{"num_key_value_heads": groups, "final_logit_softcapping": 15.0, "head_dim": c.head_dim},
            **{"tie_word_embeddings": False, "attn_implementation": "eager", "pad_token_id": 256},
        )
    ).eval()
    other.config.rope_parameters["rope_theta"] = c.rope_base
    theirs = {"model.embed_tokens.weight": model.embedding, "lm_head.weight": model.head.weight}
    for n, block in enumerate(model.blocks):
        attention, ffn = block.attention, block.ffn
        named = {"mlp.fc1": ffn.up, "mlp.fc2": ffn.down, "self_attn.o_proj": attention.out}
        theirs[f"model.layers.{n}.self_attn.v_proj.weight"] = attention.v.weight
        for name in "qk":
            halves = getattr(attention, name).weight.unflatten(0, (-1, 2, c.head_dim // 2))
            theirs[f"model.layers.{n}.self_attn.{name}_proj.weight"] = halves.flip(1).flatten(0, 2)
        theirs |= {f"model.layers.{n}.{name}.weight": part.weight for name, part in named.items()}
    other.load_state_dict({name: weight.detach() for name, weight in theirs.items()})
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, other(x).logits, rtol=1e-5, atol=1e-5)


def test_a_fresh_models_gates_are_one_and_its_layers_add_nothing():
    model, x = build_gpt(busy=False), text(2, 12)
    gates = [block.attention.gate for block in model.blocks]
    assert [gate is not None for gate in gates] == [False, True, False, True]
    assert torch.equal(2 * gates[3](torch.randn(5, 32)).sigmoid(), torch.ones(5, 4))
    no_layers = build_gpt(busy=False, layers=1, value_embeddings="none", residual_mix="none")
    no_layers.load_state_dict(model.state_dict(), strict=False)
    mixed = model(x).logits  # x <- x + 0.1 x0 four times, normed again
    torch.testing.assert_close(mixed, no_layers(x).logits)


def test_every_switch_changes_the_model():
    x = text(1, 30)
    seen = [build_gpt(**changes)(x).logits for changes in SWITCHES.values()]
    for number, logits in enumerate(seen):
        assert not any(torch.equal(logits, other) for other in seen[:number])


def test_one_loop_is_the_flat_stack_and_loops_share_weights():
    flat, x = build_gpt(), text(2, 20)
    looped = build_gpt(recurrence={"layers": [1, 2], "loops": 1})
    assert torch.equal(flat(x).logits, looped(x).logits)
    unrolled = build_gpt(layers=8, value_embeddings="none", windows="L")
    three = build_gpt(recurrence={"layers": [1, 2], "loops": 3}, value_embeddings="none", windows="L")
    unrolled.load_state_dict({k: v for k, v in three.state_dict().items() if "blocks" not in k}, strict=False)
    assert three.config.order(3) == [0, 1, 2, 1, 2, 1, 2, 3]
    for block, layer in zip(unrolled.blocks, three.config.order(3), strict=True):
        block.load_state_dict(three.blocks[layer].state_dict())
    assert torch.equal(three(x).logits, unrolled(x).logits)
    once = build_gpt(value_embeddings="none", windows="L")
    once.load_state_dict(three.state_dict())
    assert torch.equal(three(x, n_loops=1).logits, once(x).logits)
    with pytest.raises(ValueError, match="has no loops"):
        flat.loops(2)


@pytest.mark.parametrize(
    ("switch", "start"),
    [("nanochat", "uniform"), ("golf", "uniform"), ("golf", "torch"), ("golf", "orthogonal")],
)
def test_weights_begin_as_described_also_by_way_of_the_meta_device(switch, start):
    own = {"start": start}
    here = build_gpt(busy=False, hidden=64, **SWITCHES[switch] | own)
    late = on_meta(**here.config.model_dump(exclude={"family"}))
    late.to_empty(device="cpu")
    torch.manual_seed(0)
    late.reset_parameters()
    for (name, a), (_, b) in zip(here.named_parameters(), late.named_parameters(), strict=True):
        assert torch.equal(a, b) and vars(a) == vars(b), name
    for block in here.blocks:
        for zero in (block.attention.out, block.ffn.down):
            assert start == "torch" or not zero.weight.any()
        for w in (block.attention.q.weight.detach(), block.ffn.up.weight.detach()):
            if start == "orthogonal":
                torch.testing.assert_close(w.T @ w, torch.eye(64), atol=1e-5, rtol=0)
            else:  # uniform
                std = 1 / 8 if start == "uniform" else (3 * 64) ** -0.5
                assert w.std().item() == pytest.approx(std, rel=0.05) and w.abs().max() <= 3**0.5 * std
    if start == "uniform":
        std = 0.005 if switch == "golf" else 1.0
        assert here.embedding.std().item() == pytest.approx(std, rel=0.05)


def test_skips_give_the_second_half_what_the_first_left():
    model, x = build_gpt(**SWITCHES["skips"]), text(1, 20)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    model(x)
    entered, left = zip(*seen, strict=True)
    first, second = model.skips
    for at, skip, of in ((2, first, 1), (3, second, 0)):
        g = skip.gate.sigmoid()
        torch.testing.assert_close(entered[at], (1 - g) * skip.scale * left[of] + g * left[at - 1])
    assert entered[4] is left[3]
    deeper = build_gpt(**SWITCHES["looped_skips"])
    assert len(deeper.skips) == 3
    for n_loops in (1, 2, 7):
        assert deeper(x, n_loops=n_loops).logits.isfinite().all()
    deeper(x, x, n_loops=1).loss.backward()
    assert all(p.grad is not None for p in deeper.parameters()), "DDP waits for all"
    assert not deeper.skips[2].scale.grad.any() and deeper.skips[1].scale.grad.any()


def test_the_norm_of_layer_n_is_one_over_the_root_of_its_number():
    """Layers count from one: the first reads the stream at a root mean square of 1, the fourth at 1/2.

    Both norms of a layer are scaled; without ``norm_scale`` none is.
    """
    x = text(1, 30)
    for scaled in (True, False):
        model, seen = build_gpt(norm_scale=scaled), list[tuple[nn.Module, Tensor]]()
        parts = [part for block in model.blocks for part in (block.attention.q, block.ffn.up)]
        for part in parts:
            part.register_forward_pre_hook(lambda part, read, seen=seen: seen.append((part, read[0])))
        model(x)
        assert [part for part, _ in seen] == parts
        for number, (_, h_BTD) in enumerate(seen):
            expected = (1 + number // 2) ** -0.5 if scaled else 1.0
            assert h_BTD.square().mean().sqrt().item() == pytest.approx(expected, rel=1e-3)


def test_xsa_leaves_nothing_along_the_positions_own_value():
    model = build_gpt(xsa=True, kv_heads=2)
    attention, seen = model.blocks[0].attention, []
    attention.out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    attention.v.register_forward_hook(lambda _, __, out: seen.append(out))
    model(text(1, 12))
    v, y = seen[0].unflatten(-1, (2, 8)).repeat_interleave(2, 2), seen[1].unflatten(-1, (4, 8))
    assert (y * v).sum(-1).abs().max() < 1e-5 < y.abs().max()


# ------------------------------------------------------------------------------------ what sees, and learns


@pytest.mark.parametrize("switch", SWITCHES)
def test_no_logit_sees_a_later_id(switch):
    """Row t of a batch is changed at position t. In float64 the outputs before it keep every bit."""
    T = 14
    model = build_gpt(**SWITCHES[switch]).double().eval()
    same = text(1, T).expand(T, T)
    changed = same + torch.eye(T, dtype=torch.int64)
    with torch.no_grad():
        before, after = model(same).logits, model(changed).logits
    for t in range(T):
        assert torch.equal(before[t, :t], after[t, :t])
        assert not torch.equal(before[t, t], after[t, t])


@pytest.mark.parametrize("switch", SWITCHES)
def test_gradients_reach_every_parameter(switch):
    """The test takes one step first: some parameters start at zero, and their factors have no gradient
    before."""
    model = build_gpt(busy=False, **SWITCHES[switch])
    x = text(2, 32, size=272)
    for _ in range(3):
        model.zero_grad()
        model(x[:, :-1], x[:, 1:]).loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad.sign()
    assert [name for name, p in model.named_parameters() if not p.grad.any()] == []


@pytest.mark.parametrize(("autocast", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_narrow_table_does_not_narrow_the_stream(autocast, dtype):
    model = build_gpt()
    model.embedding.data = model.embedding.data.to(torch.bfloat16)
    seen = []
    model.blocks[0].register_forward_hook(lambda module, given, x: seen.append((given[0].dtype, x.dtype)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(text(1, 9), text(1, 9)).loss.backward()
    assert seen == [(dtype, dtype)] and model.embedding.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_added_rows_are_never_predicted_and_never_learn(tied):
    padded, plain = (build_gpt(vocab_multiple=multiple, tied=tied) for multiple in (100, 1))
    assert len(padded.embedding) == 300 and len(plain.embedding) == 272
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(padded.get_parameter(name)[:272] if p.shape[0] == 272 else padded.get_parameter(name))
    x = text(2, 9)
    assert torch.equal(padded(x).logits, plain(x).logits)
    assert torch.equal(padded(x, x, reduction="none").loss, plain(x, x, reduction="none").loss)
    stream = padded.incremental(9)
    torch.testing.assert_close(stream.extend(x[0].tolist()), plain(x[:1]).logits[0], rtol=1e-4, atol=1e-4)
    padded(x, x).loss.backward()
    for name, p in padded.named_parameters():
        if p.shape[0] == 300:
            assert p.grad is not None and not p.grad[272:].any(), name
            assert p.grad[:272].any(), name


# -------------------------------------------------------------------------------------- arithmetic and loss


def test_bf16_weights_see_2048_positions_as_float32_does():
    """The same weights, rounded to bfloat16 once, run in both types.

    Windows of 5 make neighbours matter: positions 1,000 and 1,001 are the same number in bfloat16.
    """
    narrow = build_gpt(busy=False, windows="SSSL", qk_gain=4.0)
    with torch.no_grad():
        for parameter in narrow.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    narrow = narrow.bfloat16()
    exact, x = build_gpt(busy=False, windows="SSSL", qk_gain=4.0), text(1, 2048)
    exact.load_state_dict(narrow.state_dict())
    with torch.no_grad():
        difference, reference = narrow(x).logits - exact(x).logits, exact(x).logits
    for begin in range(0, 2048, 256):
        part = slice(begin, begin + 256)
        assert difference[:, part].norm() < 0.05 * reference[:, part].norm(), f"from position {begin}"


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_of_many_ids_is_made_piece_by_piece(tied, monkeypatch):
    """Computed in pieces, nats and gradients equal those computed at once."""
    monkeypatch.setattr(gpt, "_POSITIONS", 7)
    model, x = build_gpt(vocab_size=5000, layers=1, tied=tied), text(2, 20, size=5000)
    labels = x.roll(-1, 1)
    labels[0, 3:9] = IGNORED
    found = []
    for many in (4096, 5000):
        monkeypatch.setattr(gpt, "_LARGE_VOCABULARY", many)
        model.zero_grad()
        model(x, labels).loss.backward()
        nats = model(x, labels, reduction="none").loss
        found.append([nats.detach(), *(p.grad.clone() for p in model.parameters())])
    for piecewise, whole in zip(*found, strict=True):
        torch.testing.assert_close(piecewise, whole, rtol=1e-5, atol=1e-6)
    expected = F.cross_entropy(model(x).logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(found[0][0].flatten(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_compiled_loss_of_many_ids_keeps_the_product_and_equals_that_of_pieces():
    torch.compiler.reset()
    x, found = text(2, 20, size=5000), []
    for compiled, way in ((False, "none"), (True, "none"), (True, "full")):
        model = build_gpt(vocab_size=5000, layers=1, checkpointing=way)
        if compiled:
            compile_forward(model, backend="aot_eager", fullgraph=True)
        model(x, x.roll(-1, 1)).loss.backward()
        found.append([p.grad for p in model.parameters()])
        assert model.in_pieces(compiled) == (not compiled or way == "full")
    for pieces, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, pieces, rtol=1e-5, atol=1e-6)


def test_an_index_corrects_the_logits_behind_the_cap():
    memory = {"contexts": [1, 2], "matches": [2], "hidden": 8, "state": 8}
    model, x = build_gpt(ngram=memory), text(2, 9)
    known = torch.randint(0, 9, (2, 9, model.ngram.layout.width), dtype=torch.uint8)
    with pytest.raises(ValueError, match="this model reads an n-gram index"):
        model(x)
    assert model(x, x, candidates_BTW=known).loss.isfinite()
    assert not torch.equal(model(x, candidates_BTW=known).logits, model(x, candidates_BTW=0 * known).logits)
    assert model.parameters_by_part()["ngram"] > 0
    with pytest.raises(ValueError, match="ngram: the index is over bytes, but this model reads 5,000 tokens"):
        config_of(ngram=memory, vocab_size=5000)


def test_fp8_leaves_gates_and_head_wide():
    names = eligible(on_meta(vocab_size=32_768, hidden=2048, heads=16, layers=2))
    assert {name.split(".", 2)[-1] for name in names} == {
        *(f"attention.{name}" for name in ("q", "k", "v", "out")),
        *("ffn.up", "ffn.down"),
    }


# ------------------------------------------------------------------------------------- inspector, bad input


class Pairs:
    """Tokens from 272 on stand for two bytes."""

    bytes_of = torch.tensor([1] * 256 + [0] * 16 + [2] * 28, dtype=torch.uint8).numpy()


def test_the_inspector_counts_bytes_a_token_and_cuts_behind_each():
    model = build_gpt(vocab_size=300)
    model.tokens = Pairs()
    inspector = model.inspector()
    ids = torch.tensor([[257, 65, 280, 290, 258, 66]])
    inspector.observe(model(ids, ids, trace=True).trace, torch.tensor([[1, 1, 1, 0, 1, 1]]).bool().numpy())
    assert inspector.figures()[0]["counts"] == [0, 2, 1] and inspector.uncut is None
    closes, probability = inspector.cut(ids)
    assert closes.all() and closes.shape == (1, 6) and probability is None
    assert inspector.caption(3, [1, 2]) == "2 tokens in 3 bytes, 1.50 bytes a token."
    assert build_gpt().inspector().uncut == "this model reads bytes, each is its own token"


def test_small_numbers_act_on_a_narrow_stream():
    """1.003 is 1 in bf16."""
    model = build_gpt(**SWITCHES["golf"])
    x = torch.randn(2, 4, 32).bfloat16()
    mix, skip = model.blocks[0].mix, model.skips[0]
    with torch.no_grad():
        for part in (*mix.parameters(), *skip.parameters()):
            part.zero_()
        for one in (mix.stream, skip.scale):
            one += 1.003
        moved = (x.float() * 1.003).bfloat16()
        assert torch.equal(mix(x, x), moved) and not torch.equal(moved, x)
        torch.testing.assert_close(skip(x, x.new_zeros(x.shape)), (x.float() * 1.003 / 2).bfloat16())
