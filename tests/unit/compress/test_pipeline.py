"""A trained model becomes a file that another process reads to the bit, as large as asked."""

import hashlib
import json
import lzma
import pickle
import shutil
import subprocess
import sys
import tracemalloc
import zlib
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from spider import load_model
from spider.checkpoints.compressed import CompressedReceipt
from spider.checkpoints.inventory import below, examine
from spider.checkpoints.load import Checkpoint
from spider.cli import cli
from spider.compress import code, format
from spider.compress.fit import LEAST, SLACK, fill, first_clip
from spider.compress.pipeline import compress
from spider.compress.predict import predict
from spider.config import CompressConfig
from spider.config.model import family_block, merged, presets
from spider.data.encode import encode_part
from spider.data.metadata import build_metadata
from spider.errors import CheckpointError
from spider.evaluation.evaluate import evaluate
from spider.model import build_model
from spider.model.interface import model_tensors
from spider.publish.export import export
from spider.results import CompressedFolder, Results, StageFolder, write_config
from spider.training.stage import train
from tests.unit.small_datasets import dataset

ROOT = Path(__file__).parents[3]
PLENTY = 10**6


@pytest.fixture(scope="session")
def trained(tmp_path_factory, shards, make_spec, talk, talk_spec):
    """A stage of each family: experts, tables and loops over bytes; skips, loops and values over tokens."""
    made = {}
    for family, spec, data in (("spider", make_spec(max_steps=6), shards), ("gpt", talk_spec, talk)):
        train(spec, folder := tmp_path_factory.mktemp(family) / "a", data)
        made[family] = StageFolder(folder), spec, data
    return made


@pytest.fixture(autouse=True, scope="session")
def counted_once():
    """Which modules a family needs costs a process that imports torch, and packing them half a second: each
    is done once."""
    kept, ask, ask_by, measure = {}, code.needed, code.needed_by, code.size

    def needed(path):
        family = format.read(path).header["model"]["family"]
        return kept.get(family) or kept.setdefault(family, ask(path))

    def size(modules):
        names = tuple(modules)
        return kept.get(names) or kept.setdefault(names, measure(modules))

    code.needed, code.size = needed, size
    code.needed_by = lambda config: kept[json.loads(config)["family"]]
    yield ask_by
    code.needed, code.needed_by, code.size = ask, ask_by, measure


def compressed(trained, family, output, **asked):
    folder, spec, data = trained[family]
    return compress(
        folder.receipt, spec, CompressConfig(**{"cap": PLENTY, "windows": 8, **asked}), data, output
    )


@pytest.fixture(scope="session")
def files(tmp_path_factory, trained):
    made = {}
    for family in trained:
        output = tmp_path_factory.mktemp(f"compressed-{family}")
        made[family] = CompressedFolder(output), compressed(trained, family, output, clip=8.0)
    return made


FAMILIES = pytest.mark.parametrize("family", ["spider", "gpt"])

#: A process that for each file forks one that may import no module of ours but those that were counted, and
#: prints a digest of logits.
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
    from spider.compress.format import read
    model = read(Path(path)).model()
    with torch.no_grad():
        digest = hashlib.sha256(model(torch.arange(40)[None]).logits.numpy().tobytes()).hexdigest()
    print(digest, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="session")
def read_elsewhere(files):
    """Digests of the logits that other processes with no more than the counted source have, by family."""
    given = [(str(folder.model), ",".join(receipt.compressed.modules)) for folder, receipt in files.values()]
    command = [sys.executable, "-c", _STRICT, *chain.from_iterable(given)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(files, done.stdout.split(), strict=True))


@FAMILIES
def test_a_process_with_no_more_than_the_counted_source_reads_it_to_the_bit(
    files, trained, read_elsewhere, family
):
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
    assert 0 < change < 1.0, "close to what it was compressed from, and not that"
    unneeded = {"spider.config.schema", "spider.compress.writer", "spider.tokens.sentencepiece"}
    assert not unneeded & set(receipt.compressed.modules), "what only configures or writes is not counted"


@FAMILIES
def test_weights_are_steps_times_small_integers_weighed_by_what_enters(files, trained, family):
    folder, receipt = files[family]
    whole = model_tensors(Checkpoint.at(trained[family][0].receipt).model(), "")
    read = model_tensors(load_model(folder.receipt)[0], "")
    assert read.keys() == whole.keys()
    for name, record in receipt.compressed.matrices.items():
        w = format.matrices(read[name])
        assert all(len(row.unique()) <= 255 for one in w for row in one), name
        assert (w - format.matrices(whole[name])).abs().mean() < 0.2 * whole[name].float().std() + 1e-6
        if record.error is not None:
            assert record.error <= record.error_nearest * 1.0001 + 1e-12, name
    tables = [name for name in receipt.compressed.rounded if "[" not in name]
    expected = {"spider": ["core.layers.0.engram.tables.weight"], "gpt": ["embedding"]}[family]
    assert set(tables) >= set(expected), "what is looked up is entered by nothing"
    assert not [name for name in tables if name.endswith(("q.weight", "down.weight", "head.weight"))]


def test_experts_are_weighed_by_their_own_rows(files):
    records = files["spider"][1].compressed.matrices
    assert any("experts" in name and one.error is not None for name, one in records.items())


@FAMILIES
def test_the_same_run_gives_the_same_file(files, trained, family, tmp_path):
    again = compressed(trained, family, tmp_path, clip=8.0)
    assert again.compressed.sha256 == files[family][1].compressed.sha256
    assert files[family][0].model.read_bytes() == (tmp_path / "model.spider").read_bytes()


# ------------------------------------------------------------------------------------------------ the size


def test_the_clip_is_found_that_fills_the_cap(files, trained, tmp_path):
    large = files["gpt"][1].compressed
    small = compressed(trained, "gpt", tmp_path, clip=20.0, method="nearest").compressed
    assert small.total_bytes < large.total_bytes
    cap = (small.total_bytes + large.total_bytes) // 2
    found = compressed(trained, "gpt", tmp_path, cap=cap).compressed
    assert (1 - SLACK) * cap <= found.total_bytes <= cap and 8 < found.clip < 20
    assert found.total_bytes == (tmp_path / "model.spider").stat().st_size + found.code_bytes
    assert sum(found.parts.values()) == found.bytes


def test_a_cap_that_cannot_be_is_said_and_nothing_is_left(files, trained, tmp_path):
    one = files["gpt"][1].compressed
    for said, asked in (
        (r"runs.r.compress.cap: the code alone is [\d,]+ bytes", {"cap": 1000}),
        (r"[\d,]+ bytes even at clip 96; cap is .*fewer parameters", {"cap": one.code_bytes + 2000}),
        (r"compress.clip: [\d,]+ bytes, [\d,]+ over cap; at clip [\d.]+ it",
         {"cap": one.total_bytes - 500, "clip": 8.0}),
        (r"compress.clip: .* over cap; no clip makes it so small",
         {"cap": one.code_bytes + 2000, "clip": 8.0}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            compressed(trained, "gpt", tmp_path, method="nearest", **asked)
    assert not list(tmp_path.iterdir())


def test_its_size_is_foretold(files, trained):
    """The tables of toys, most of whose rows were never read, are far from Gaussian: hence a tenth."""
    for family, (_, receipt) in files.items():
        with torch.device("meta"):
            model = build_model(trained[family][1].model)
        told = receipt.compressed
        found = predict(model, CompressConfig(cap=PLENTY, clip=8.0))
        assert found["clip"] == 8.0 and found["total_bytes"] == sum(found["bytes"].values())
        assert found["total_bytes"] == pytest.approx(told.total_bytes, rel=0.1)
    asked = CompressConfig(cap=told.total_bytes)
    assert predict(model, asked)["total_bytes"] == pytest.approx(told.total_bytes, rel=0.003)
    none = predict(model, asked.model_copy(update={"cap": 40_000}))
    assert none["clip"] is None and none["total_bytes"] > 40_000


def test_the_code_is_known_before_there_is_a_file(files, trained, counted_once):
    found, needed = (
        counted_once(trained["gpt"][1].model.model_dump_json()),
        files["gpt"][1].compressed.modules,
    )
    assert set(found) <= set(needed) and len(needed) - len(found) <= 2


def test_a_records_shape_is_foretold_as_the_record_came_out(files):
    """parameter-golf #1394: 35,943,512 parameters, 15.98 MB with brotli."""
    block = {"preset": "golf-16mb", "vocab_size": 8192, "recurrence": {"first": 4, "last": 5, "loops": 3}}
    with torch.device("meta"):
        model = build_model(family_block({**merged(presets("gpt")["golf-16mb"], block), "family": "gpt"}))
    assert model.num_parameters() == 35_943_512
    assert predict(model, CompressConfig(clip=12.85))["total_bytes"] == pytest.approx(15.85e6, rel=0.005)


def test_the_search_ends_within_its_slack_or_at_the_finest_step():
    def size(clip, off=0.0):
        return 50_000 + 10_000 * (8 - torch.tensor(clip).log2().item()) * (1 + off)

    for off in (-0.02, 0.0, 0.02):
        clip, total = fill(100_000, 80_000, size, lambda clip, off=off: round(size(clip, off)))
        assert 99_700 <= total <= 100_000 and LEAST < clip < 96
    for cap in (84_000, 100_000, 109_000):
        clip = first_clip(cap, size)
        assert clip > LEAST and size(clip) == pytest.approx(cap * (1 - SLACK / 2), abs=5)
    assert fill(10**6, 80_000, size, lambda clip: round(size(clip)))[0] == LEAST
    with pytest.raises(ValueError, match=r"even at clip 96"):
        fill(50_000, 80_000, size, lambda clip: round(size(clip)))


# ------------------------------------------------------------------------------------------- what is damaged


def test_any_byte_that_differs_is_an_error(files, tmp_path):
    data, path = files["gpt"][0].model.read_bytes(), tmp_path / "model.spider"
    places = [*range(0, 400, 3), *range(400, len(data), len(data) // 40), len(data) - 1]
    for at in places:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=r"model.spider: "):
            format.read(path)
    for wrong in (data[:-1], data + b"\0", data[:30], data[:5], b""):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"model.spider: "):
            format.read(path)


def lying(data, path, **changes):
    """The file with another header, whole by its digests; ``classes`` are what that section holds."""
    length = int.from_bytes(data[8:12], "little")
    header, rest = json.loads(zlib.decompress(data[20 : 20 + length])), data[20 + length :]
    if (classes := changes.pop("classes", None)) is not None:
        begin, sizes = header["sections"][0], header["sections"]
        end, packed = begin + sizes[1], zlib.compress(classes)
        rest = rest[:begin] + packed + rest[end:]
        header["sections"] = [sizes[0], len(packed), *sizes[2:]]
        header["sha256"] = hashlib.sha256(rest).hexdigest()
    packed = zlib.compress(json.dumps(header | changes).encode())
    digest = hashlib.sha256(packed).digest()[:8]
    path.write_bytes(data[:8] + len(packed).to_bytes(4, "little") + digest + packed + rest)
    return path


def test_a_header_that_lies_is_refused_before_anything_is_made(files, tmp_path):
    data, path = files["gpt"][0].model.read_bytes(), tmp_path / "model.spider"
    whole = format.read(files["gpt"][0].model)
    header, classes = whole.header, zlib.decompress(whole.sections["classes"])
    model = header["model"]
    for changes, said in (
        ({"format": 1}, r"of format 1, this Spider reads 2"),
        ({"sections": [2**40, 0, 0, 0, 0]}, r"does not match its SHA-256"),
        ({"quantized": header["quantized"][1:]}, r"tensors are not those of its architecture"),
        ({"quantized": [[n, 3, *m] for n, _, *m in header["quantized"]]}, r"tables are not of its"),
        ({"quantized": [[*m, 10**9] for *m, _ in header["quantized"]]}, r"classes of its rows are not those"),
        ({"classes": classes[:-1]}, r"classes of its rows are not those"),
        ({"classes": classes + bytes(10**6)}, r"classes of its rows are not those"),
        ({"classes": bytes([99]) + classes[1:]}, r"\S+ has rows of a class that there is not"),
        ({"model": model | {"layers": 5}}, r"tensors are not those of its architecture"),
        ({"model": model | {"hidden": 2**20, "heads": 2**14}}, r"too small for the model"),
        ({"weights": "0" * 16}, r"weights are not those of its digest"),
        ({"quantized": [[n, 10**9, *m] for n, _, *m in header["quantized"]]}, r"not of 2 to 8 bits"),
        ({"exact": [[n, "float99"] for n, _ in header["exact"]]}, r"of float99 is not there whole"),
        ({"exact": [[n, "float64"] for n, _ in header["exact"]]}, r"of float64 is not there whole"),
        ({"quantized": [[n, 1, *m] for n, _, *m in header["quantized"]]}, r"not of 2 to 8 bits"),
        ({"exact": []}, r"tensors are not those of its architecture"),
        ({"model": {"family": "nobody"}}, r"header is of another version, or wrong .*nobody"),
        ({"lanes": None}, r"header is of another version, or wrong"),
        ({"lanes": 10**9}, r"too few for 1000000000 lanes"),
    ):
        with pytest.raises(CheckpointError, match=said):
            format.read(lying(data, path, **changes)).model()
    path.write_bytes(pickle.dumps({"weights": [1, 2]}))
    with pytest.raises(CheckpointError, match=r"not a compressed model of this version"):
        format.read(path)


def wide_window(packed):
    """An xz stream that asks for a window of 4 GiB to be unpacked."""
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
def test_a_tokenizer_is_not_unpacked_beyond_a_bound(packed, tmp_path):
    lies = format.CompressedModel(tmp_path / "model.spider", {}, {"tokenizer": packed})
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"model.spider: its tokenizer cannot be unpacked"):
            lies.tokenizer  # noqa: B018
        assert tracemalloc.get_traced_memory()[1] < 70 << 20
    finally:
        tracemalloc.stop()
    whole = format.CompressedModel(
        tmp_path / "model.spider", {}, {"tokenizer": lzma.compress(b"{}", preset=9)}
    )
    assert whole.tokenizer == b"{}"


def test_what_cannot_be_pressed_says_why(trained, tmp_path, monkeypatch):
    model = Checkpoint.at(trained["gpt"][0].receipt).model()
    with torch.no_grad():
        model.blocks[0].attention.q.weight[0, 0] = float("nan")
    monkeypatch.setattr(Checkpoint, "model", lambda self, device="cpu": model)
    with pytest.raises(CheckpointError, match=r"blocks.0.attention.q.weight holds numbers that are not"):
        compressed(trained, "gpt", tmp_path, method="nearest")
    assert not list(tmp_path.iterdir())


def test_without_training_text_nothing_is_known_to_enter(trained, tmp_path):
    (tmp_path / "out").mkdir()
    pq.write_table(pa.table({"text": ["held out"], "id": ["0"]}), tmp_path / "000.parquet")
    settings = dataset(validation=0.999)
    encode_part(tmp_path / "000.parquet", data := tmp_path / "shards", "000", settings)
    build_metadata(data, "toy", settings, source={}, parts=["000"])
    folder, spec, _ = trained["spider"]
    with pytest.raises(ValueError, match=r"has no training text to see what enters the matrices"):
        compress(folder.receipt, spec, CompressConfig(), data, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


# ------------------------------------------------------------------------------- as any other checkpoint


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
    made = export(folder.model, tmp_path / "exported")
    assert made.manifest.weights == receipt.weights
    assert made.tokens.digest == Checkpoint.at(folder.model).tokens.digest
    assert CompressedReceipt.read(folder.receipt) == receipt
    with pytest.raises(CheckpointError, match=r"a compressed model, from which training cannot continue"):
        Checkpoint.at(folder.model).load_into({})


@pytest.mark.parametrize("named", ["compress.json", "model.spider"])
def test_answers_to_standard_tasks_are_recorded_as_its_own(files, trained, tmp_path, named):
    """MLflow shows them on the training as ``compressed/...``, and on a model of their own."""
    pytest.importorskip("lm_eval")
    results = Results(tmp_path / "results")
    stage = results.stage("r", "a")
    shutil.copytree(trained["gpt"][0].path, stage.path)
    shutil.copytree(files["gpt"][0].path, stage.compressed)
    write_config(results.root, {})
    rows = [{"query": f"q {i}", "choices": ["one", "two"], "gold": i % 2} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "choose",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "choose.yaml").write_text(json.dumps(task))
    output = stage.compressed / "harness.json"
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "SPIDER_TRACKING": "", **offline}
    done = CliRunner(env={**environment, "TOKENIZERS_PARALLELISM": "false"}).invoke(
        cli,
        ["harness", str(stage.compressed / named), "--tasks", "choose", "--include", str(tmp_path),
         "--output", str(output)],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(output.read_text())
    (row,) = told["result"]["rows"]
    assert told["weights"] == files["gpt"][1].weights and row["columns"]["items"]["value"] == 4
    records = [json.loads(path.read_text()) for path in results.root.glob("tracking/evaluations/*.json")]
    assert [record["metrics"] for record in records] == [{"compressed/harness/choose/acc": row["value"]}]
