"""A trained model becomes a file of the requested size, which another process reads bit by bit."""

import hashlib
import json
import lzma
import math
import pickle
import shutil
import subprocess
import sys
import tracemalloc
import zlib
from itertools import chain
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from spider import load_model
from spider.checkpoints.compress import format, pipeline, writer
from spider.checkpoints.compress.pipeline import LEAST_CLIP, SLACK, compress, fit_cap
from spider.checkpoints.compress.quantize import split
from spider.checkpoints.inventory import below, examine
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import CompressedReceipt, steps
from spider.cli import cli
from spider.common.errors import CheckpointError
from spider.common.results import CompressedFolder, StageFolder
from spider.config import CompressConfig, TTTConfig
from spider.evaluation.evaluate import evaluate
from spider.model.interface import model_tensors
from spider.publish.export import export
from spider.training.stage import train
from tests.unit.model.small_gpt import build_gpt
from tests.unit.records import saved_again

ROOT = Path(__file__).parents[3]
PLENTY = 10**6


@pytest.fixture(scope="session")
def trained(tmp_path_factory, shards, make_spec, talk, talk_spec):
    """Train a stage of each family: experts, tables and loops on bytes; skips, loops and values on tokens."""
    stages = {}
    for family, spec, data in (("spider", make_spec(max_steps=6), shards), ("gpt", talk_spec, talk)):
        folder = tmp_path_factory.mktemp(family) / "a"
        train(spec, folder, data)
        stages[family] = StageFolder(folder), spec, data
    return stages


@pytest.fixture(autouse=True, scope="session")
def cached_code():
    """Measure each family's code once: finding its modules starts a process that imports torch, and packing
    them takes half a second."""
    cache = {}
    needed, size = pipeline.needed_modules, pipeline.source_size

    def needed_once(path):
        family = format.read(path).header["model"]["family"]
        return cache.get(family) or cache.setdefault(family, needed(path))

    def size_once(modules):
        return cache.get(tuple(modules)) or cache.setdefault(tuple(modules), size(modules))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "needed_modules", needed_once)
        patch.setattr(pipeline, "source_size", size_once)
        yield


def compressed(trained, family, output, **settings):
    folder, spec, data = trained[family]
    config = CompressConfig(**{"cap": PLENTY, **settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "WINDOWS", 8)
        return compress(folder.receipt, spec, config, data, output)


@pytest.fixture(scope="session")
def files(tmp_path_factory, trained):
    folders = {}
    for family in trained:
        output = tmp_path_factory.mktemp(f"compressed-{family}")
        folders[family] = CompressedFolder(output), compressed(trained, family, output, clip=8.0)
    return folders


FAMILIES = pytest.mark.parametrize("family", ["spider", "gpt"])

#: A program that forks for each file, allows the child only the counted modules of this project, and prints a
#: digest of logits.
_STRICT = """
import hashlib, os, sys
from importlib.abc import MetaPathFinder
from pathlib import Path
import torch
torch.set_num_threads(1)
class Refuses(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("spider", "kernels") and name not in allowed:
            raise ImportError(f"{name} was not counted")
sys.meta_path.insert(0, Refuses())
for path, names in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    allowed = set(names.split(","))
    from spider.checkpoints.compress.format import read
    model = read(Path(path)).model()
    with torch.no_grad():
        digest = hashlib.sha256(model(torch.arange(40)[None]).logits.numpy().tobytes()).hexdigest()
    print(digest, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="session")
def read_elsewhere(files):
    """Return digests of the logits in processes that have only the counted source, by family."""
    pairs = [(str(folder.model), ",".join(receipt.compressed.modules)) for folder, receipt in files.values()]
    command = [sys.executable, "-c", _STRICT, *chain.from_iterable(pairs)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return dict(zip(files, process.stdout.split(), strict=True))


@FAMILIES
def test_a_process_with_only_the_counted_source_reads_the_same_bits(files, trained, read_elsewhere, family):
    folder, receipt = files[family]
    model, config = load_model(folder.receipt)
    with torch.no_grad():
        logits = model(torch.arange(40)[None]).logits
    assert read_elsewhere[family] == hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    assert config.family == family and not model.training
    assert load_model(folder.model)[1] == config
    whole = Checkpoint.at(trained[family][0].receipt)
    assert model.tokens.digest == whole.tokens.digest
    with torch.no_grad():
        change = (logits - whole.model()(torch.arange(40)[None]).logits).abs().max()
    assert 0 < change < 1.0, "the logits are close to the original model's, and differ"
    unneeded = {
        "spider.config.schema",
        "spider.checkpoints.compress.writer",
        "spider.tokens.sentencepiece",
    }
    assert not unneeded & set(receipt.compressed.modules), (
        "modules that only configure or write are not counted"
    )


@FAMILIES
def test_weights_are_steps_times_small_integers_and_gptq_lowers_the_error(files, trained, family):
    folder, receipt = files[family]
    whole = model_tensors(Checkpoint.at(trained[family][0].receipt).model(), "")
    read = model_tensors(load_model(folder.receipt)[0], "")
    assert read.keys() == whole.keys()
    for name, record in receipt.compressed.matrices.items():
        w = format.matrices(read[name])
        assert all(len(row.unique()) <= 255 for row in w.flatten(0, 1)), name
        assert (w - format.matrices(whole[name])).abs().mean() < 0.2 * whole[name].float().std() + 1e-6
        if record.error is not None:
            assert record.error <= record.error_nearest * 1.0001 + 1e-12, name
    tables = [name for name in receipt.compressed.rounded if "[" not in name]
    if family == "spider":
        assert any(
            "experts" in name and one.error is not None for name, one in receipt.compressed.matrices.items()
        )
    expected = {"spider": ["core.layers.0.engram.tables.weight"], "gpt": ["embedding"]}[family]
    assert set(tables) >= set(expected), "embeddings that are only looked up have no inputs"
    assert not [name for name in tables if name.endswith(("q.weight", "down.weight", "head.weight"))]


@FAMILIES
def test_the_same_run_gives_the_same_file(files, trained, family, tmp_path):
    again = compressed(trained, family, tmp_path, clip=8.0)
    assert again.compressed.sha256 == files[family][1].compressed.sha256
    assert files[family][0].model.read_bytes() == (tmp_path / "model.spider").read_bytes()


# ------------------------------------------------------------------------------------------------ the size


def test_the_clip_that_fits_the_cap_is_found(files, trained, tmp_path):
    large = files["gpt"][1].compressed
    small = compressed(trained, "gpt", tmp_path, clip=20.0, method="nearest").compressed
    assert small.total_bytes < large.total_bytes
    cap = (small.total_bytes + large.total_bytes) // 2
    found = compressed(trained, "gpt", tmp_path, cap=cap).compressed
    assert (1 - SLACK) * cap <= found.total_bytes <= cap and 8 < found.clip < 20
    assert found.total_bytes == (tmp_path / "model.spider").stat().st_size + found.code_bytes
    assert sum(found.parts.values()) == found.bytes


def test_an_impossible_cap_is_an_error_and_nothing_is_left(files, trained, tmp_path):
    one = compressed(trained, "gpt", tmp_path / "one", clip=8.0, method="nearest").compressed
    folder = tmp_path / "folder"
    folder.mkdir()
    for message, settings in (
        (r"runs.r.compress.cap: the code alone is [\d,]+ bytes", {"cap": 1000}),
        (r"[\d,]+ bytes even at clip 96, cap is .*fewer parameters", {"cap": one.code_bytes + 2000}),
        (r"compress.clip: [\d,]+ bytes, [\d,]+ over cap; clip [\d.]+ would fit",
         {"cap": one.total_bytes - 500, "clip": 8.0}),
        (r"compress.clip: .* over cap; no clip makes it fit",
         {"cap": one.code_bytes + 2000, "clip": 8.0}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            compressed(trained, "gpt", folder, method="nearest", **settings)
    assert not list(folder.iterdir())


def test_the_search_ends_within_its_slack_or_at_the_least_clip():
    def size(clip, off=0.0):
        return 50_000 + 10_000 * (8 - math.log2(clip)) * (1 + off)

    for off in (-0.02, 0.0, 0.02):
        clip, total = fit_cap(100_000, 80_000, size, lambda clip, off=off: round(size(clip, off)))
        assert 99_700 <= total <= 100_000 and LEAST_CLIP < clip < 96
    assert fit_cap(10**6, 80_000, size, lambda clip: round(size(clip)))[0] == LEAST_CLIP
    with pytest.raises(ValueError, match=r"even at clip 96"):
        fit_cap(50_000, 80_000, size, lambda clip: round(size(clip)))


# -------------------------------------------------------------------------------------------- damaged files


def test_any_changed_byte_is_an_error(files, tmp_path):
    data = files["gpt"][0].model.read_bytes()
    path = tmp_path / "model.spider"
    changed = [*range(0, 400, 9), *range(400, len(data), len(data) // 30), len(data) - 1]
    wrong = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in changed]
    for content in (*wrong, data[:-1], data + b"\0", data[:30], data[:5], b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model.spider: "):
            format.read(path)


def with_header(data, path, **changes):
    """Write the file with a changed header and digests that match; ``clusters`` replaces that section."""
    length = int.from_bytes(data[8:12], "little")
    header = json.loads(zlib.decompress(data[20 : 20 + length]))
    rest = data[20 + length :]
    clusters = changes.pop("clusters", None)
    if clusters is not None:
        sizes = header["sections"]
        begin = sizes[0]
        packed = zlib.compress(clusters)
        rest = rest[:begin] + packed + rest[begin + sizes[1] :]
        header["sections"] = [sizes[0], len(packed), *sizes[2:]]
        header["sha256"] = hashlib.sha256(rest).hexdigest()
    packed = zlib.compress(json.dumps(header | changes).encode())
    digest = hashlib.sha256(packed).digest()[:8]
    path.write_bytes(data[:8] + len(packed).to_bytes(4, "little") + digest + packed + rest)
    return path


def test_a_header_that_contradicts_the_file_is_an_error(files, tmp_path):
    path = tmp_path / "model.spider"
    data = files["gpt"][0].model.read_bytes()
    valid = format.read(files["gpt"][0].model)
    header = valid.header
    model = header["model"]
    clusters = zlib.decompress(valid.sections["clusters"])

    def bits(number):
        return {"quantized": [[name, number, *more] for name, _, *more in header["quantized"]]}

    for changes, message in (
        ({"format": 1}, r"of format 1, this Spider reads 3"),
        ({"sections": [2**40, 0, 0, 0, 0]}, r"does not match its SHA-256"),
        ({"quantized": header["quantized"][1:]}, r"tensors are not those of its architecture"),
        (bits(3), r"tables do not match its bits"),
        (bits(10**9), r"do not have 2 to 8 bits"),
        ({"quantized": [[*m, 10**9] for *m, _ in header["quantized"]]}, r"clusters of its rows do not match"),
        ({"clusters": clusters + bytes(10**6)}, r"clusters of its rows do not match"),
        ({"clusters": bytes([99]) + clusters[1:]}, r"\S+ has rows of a cluster that does not exist"),
        ({"model": model | {"hidden": 2**20, "heads": 2**14}}, r"too small for the model"),
        ({"weights": "0" * 16}, r"weights do not match their digest"),
        ({"exact": [[n, "float64"] for n, _ in header["exact"]]}, r"of type float64, is incomplete"),
        ({"model": {"family": "nobody"}}, r"header is of another version, or wrong .*nobody"),
        ({"lanes": 10**9}, r"too few for 1000000000 lanes"),
    ):
        with pytest.raises(CheckpointError, match=message):
            format.read(with_header(data, path, **changes)).model()
    path.write_bytes(pickle.dumps({"weights": [1, 2]}))
    with pytest.raises(CheckpointError, match=r"not a compressed model of this version"):
        format.read(path)


def wide_window(packed):
    """Return an xz stream that needs a window of 4 GiB to be unpacked."""
    header = bytearray(packed[12 : 12 + 4 * (packed[12] + 1)])
    assert header[2:4] == bytes([0x21, 1]), "an LZMA2 filter with one byte of properties"
    header[4] = 40
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    return packed[:12] + bytes(header) + packed[12 + len(header) :]


@pytest.mark.parametrize(
    "packed",
    [lzma.compress(bytes(40 << 20), preset=0), wide_window(lzma.compress(b"{}")), lzma.compress(b"{}")[:-9]],
    ids=["40 MB of zeros", "a window of 4 GiB", "cut short"],
)
def test_a_tokenizer_is_unpacked_only_up_to_a_limit(packed, tmp_path):
    damaged = format.CompressedModel(tmp_path / "model.spider", {}, {"tokenizer": packed})
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"model.spider: its tokenizer cannot be unpacked"):
            damaged.tokenizer  # noqa: B018
        assert tracemalloc.get_traced_memory()[1] < 70 << 20
    finally:
        tracemalloc.stop()
    packed = lzma.compress(b"{}", preset=9)
    assert format.CompressedModel(tmp_path / "model.spider", {}, {"tokenizer": packed}).tokenizer == b"{}"


def test_weights_that_are_not_finite_are_an_error(trained, tmp_path):
    folder, *rest = trained["gpt"]
    diverged = StageFolder(shutil.copytree(folder.path, tmp_path / "a"))
    name = "model.blocks.0.attention.q.weight"
    saved_again(steps(diverged.checkpoints)[-1], lambda one: float("nan") if one == name else 1)
    with pytest.raises(CheckpointError, match=rf"not finite: {name}"):
        compressed({"gpt": (diverged, *rest)}, "gpt", tmp_path / "out", method="nearest")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------ like any other checkpoint


@FAMILIES
def test_it_is_evaluated_listed_verified_generated_from_and_exported(files, trained, family, tmp_path):
    (folder, receipt), (_, spec, data) = files[family], trained[family]
    scored = evaluate(folder.receipt, spec, data, folder.path)
    assert scored.weights == receipt.weights and scored.bpb > 0
    (found,) = below(folder.path)
    assert found == folder.model and examine(found)["good"]
    runner = CliRunner()
    assert "good" in runner.invoke(cli, ["checkpoint", "verify", str(folder.model)]).output
    assert runner.invoke(cli, ["generate", str(folder.model), "--bytes", "5"]).exit_code == 0
    exported = export(folder.model, tmp_path / "exported")
    assert exported.manifest.weights == receipt.weights
    assert exported.tokens.digest == Checkpoint.at(folder.model).tokens.digest
    assert CompressedReceipt.read(folder.receipt) == receipt
    with pytest.raises(CheckpointError, match=r"a compressed model, from which training cannot continue"):
        Checkpoint.at(folder.model).load_into({})


def test_it_learns_while_it_is_scored_and_stays_as_it_is(files, trained, tmp_path):
    (folder, receipt), (_, spec, data) = files["gpt"], trained["gpt"]
    ttt = TTTConfig(chunk=8, objective="projection", layers="all", reset="window", lr=0.01)
    before = folder.model.read_bytes()
    for lr in (0.01, 0.0):
        changed = {"ttt": ttt.model_copy(update={"lr": lr}), "max_bytes": 600, "overlap": 0.75}
        settings = spec.evaluation.model_copy(update=changed)
        scored = evaluate(folder.receipt, spec.model_copy(update={"evaluation": settings}), data, tmp_path)
        carried = scored.results["adapt"].rows[0].carried.value
        assert carried > 0 and (carried == pytest.approx(scored.bpb_carried, rel=1e-6)) == (lr == 0)
    assert folder.model.read_bytes() == before and scored.weights == receipt.weights


def test_numbers_beyond_float16_are_stored_exactly(tmp_path, caplog):
    caplog.set_level("INFO")
    model = build_gpt()
    _, exact = split(model, CompressConfig())
    name = next(name for name, tensor in exact.items() if tensor.dtype == torch.float16)
    weight = dict(model.named_parameters())[name]
    weight.data.view(-1)[:2] = torch.tensor([7e4, -7e4])
    parts, exact = split(model, CompressConfig())
    assert f"{name} has numbers beyond float16 and is stored exactly" in caplog.text
    quantized = {part.name: part.nearest(12.0) for part in parts}
    about = {"model": model.config.model_dump(mode="json"), "window": 8}
    content, _ = writer.compressed(about, b"", model_tensors(model, ""), quantized, exact)
    (tmp_path / "model.spider").write_bytes(content)
    read = format.read(tmp_path / "model.spider").model()
    assert torch.equal(dict(read.named_parameters())[name], weight)
