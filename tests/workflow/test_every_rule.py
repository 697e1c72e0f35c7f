"""One workflow with jobs of every rule: where tokens and indexes arrive, what jobs record, and what is shown.

It runs on a machine without git, in a folder with spaces in its name. Its family of models is one folder, and
one of its sources and one of its measurements is a file. Python finds these toys by their import path, like
the modules of a user.
"""

import copy
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import mlflow
import pytest
from click.testing import CliRunner
from mlflow import MlflowClient

from spider import load_model
from spider.cli import cli
from spider.common.errors import CheckpointError
from spider.common.files import read_json
from spider.common.results import StageFolder
from spider.data.ngram.store import open_index
from spider.data.packing import Packing
from spider.evaluation.bpb import clip_stream, score
from spider.evaluation.records import results_of
from spider.evaluation.text import validation_stream
from spider.model.reading import Scoring
from spider.provenance.lineage import Lineage
from spider.provenance.made import jobs
from spider.tokens import BYTES
from spider.tokens.stored import read_tokens
from tests import forkserver
from tests.transformers_models import byte_level, gpt2

from .conftest import ROOT, Workflow
from .test_ngram import NGRAM

TOY = "tests.families.toy"
VOWELS = "tests.measurements.vowels"
PARAGRAPHS = "own {text}.txt"  # Snakemake reads braces as a wildcard.
CLEANING = {"filters": ["text !~ 'Document 7 '"], "exact": True, "near": 1.0, "decontaminate": True}


def add_tokens(workflow):
    """Configure a run on bytes, and a run on tokens with packed rows, compression and a task."""
    workflow.config["datasets"]["text-bpe"] = {"like": "text", "tokenizer": "bpe"}
    workflow.config["tokenizers"] = {"bpe": {"data": "text", "vocab_size": 350}}
    run = workflow.config["runs"].pop("small")
    first = run["stages"][0] | {"max_steps": 10}
    packed = {"name": "packed", "max_steps": 5, "warmup_steps": 0, "packing": "best_fit"}
    run |= {"model": {"family": TOY, "width": 8}, "stages": [first]}
    run["evaluation"]["measurements"] = {VOWELS: {"letters": "aeiouy"}}
    workflow.config["runs"] = {"bytes": run, "bpe": {**run, "data": "text-bpe", "stages": [first, packed]}}
    workflow.config["runs"]["bpe"] |= {"compress": {"cap": 1_000_000}}
    workflow.config["audit"] = {"bpe": "quick", "bytes": True}
    return workflow


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run a tracked workflow once, with jobs of all rules; return it and its output."""
    home = tmp_path_factory.mktemp("every-rule")
    (folder := home / "a folder with spaces").mkdir()
    (programs := home / "bin").mkdir()
    # The executor plugin for Slurm calls `which` wherever Snakemake starts.
    for name in ("bash", "sh", "env", "rm", "mkdir", "which"):
        (programs / name).symlink_to(shutil.which(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        made = add_tokens(Workflow(folder))
        datasets, runs = made.config["datasets"], made.config["runs"]
        datasets["text"] |= {"ngram": 0.5, "cleaning": CLEANING}
        datasets["text-bpe"]["ngram"] = 0
        paragraphs = [f"Paragraph {i}. " + "abc " * (i % 50) for i in range(200)]
        (folder / PARAGRAPHS).write_text("\n\n".join(paragraphs))
        source = {"kind": "tests.sources.toy", "file": PARAGRAPHS, "min_words": 5}
        datasets["words"] = {"source": source, "validation": 0.2}
        made.config["trace"] = ["text", "words"]
        texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
        gpt2(folder / "a gpt2", byte_level(texts))
        made.config["foreign"] = {"gpt2": "a gpt2"}
        runs["bytes"]["data"] = {"mix": {"text": 4, "words": 1}}
        runs["bytes"]["model"] = runs["bytes"]["model"] | {"ngram": NGRAM}
        runs["bpe"]["evaluation"] = runs["bpe"]["evaluation"] | {"ttt": {"chunk": 64}, "checkpoints": 2}
        runs["bpe"]["defaults"] = runs["bpe"]["defaults"] | {"ckpt_every": 5}
        runs["bytes"]["evaluation"] = runs["bytes"]["evaluation"] | {"data": "text"}
        yield made, made(PATH=str(programs))


@pytest.fixture
def everything(finished, monkeypatch):
    """Return the finished workflow, in whose folder a test works. It may change the configuration."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    made, _ = finished
    monkeypatch.chdir(made.folder)
    config = made.config
    made.config = copy.deepcopy(config)
    yield made
    made.config = config
    made.command()  # It writes the configuration.


@pytest.fixture(scope="module")
def export(finished, tmp_path_factory):
    """Return a function that exports a stage once, and returns the folder."""
    folder = tmp_path_factory.mktemp("exported")

    def made(stage):
        output = folder / stage.replace("/", "-")
        if not output.exists():
            spider("checkpoint", "export", finished[0].results / "runs" / stage, output)
        return output

    return made


@pytest.fixture(scope="module")
def store(finished):
    """Return a client of the store, and the experiments of jobs and of trainings."""
    client = MlflowClient(f"sqlite:///{finished[0].results / 'mlflow.db'}")
    return client, *(client.get_experiment_by_name(name).experiment_id for name in ("Pipeline", "Training"))


def model_in(store, name):
    """Return the metrics of a logged model."""
    client, _, training = store
    (model,) = client.search_logged_models([training], f"name = '{name}'")
    return {one.key: one.value for one in model.metrics}


def spider(*words, status=0):
    """Return what a command prints. It runs in this process, which has imported torch and the family."""
    done = CliRunner().invoke(cli, list(map(str, words)))
    assert isinstance(done.exception, (SystemExit, type(None))), done.exception
    assert done.exit_code == status, done.output
    return done.output


def test_a_tokenizer_is_learned_once_and_every_model_and_score_has_it(finished, everything, export):
    assert finished[1].count("start pack") == 1 and "Bits per byte of" in finished[1]
    results = everything.results
    raw = {path.name for path in (results / "raw").iterdir()}
    assert raw == {"text", "words"}, "text-bpe downloads nothing itself"
    learned = read_tokens(results / "tokenizers/bpe/tokenizer.json")
    stages = {run: results / "runs" / run / "first" for run in ("bytes", "bpe")}
    measured = {run: read_json(stage / "evaluation.json") for run, stage in stages.items()}
    assert measured["bytes"]["text_sha256"] == measured["bpe"]["text_sha256"]
    assert measured["bytes"]["bytes"] == measured["bpe"]["bytes"] == measured["bpe"]["targets"]["byte"]
    rates = [read_json(stage / "baselines.json") for stage in stages.values()]
    assert {one["text_sha256"] for one in rates} == {measured["bytes"]["text_sha256"]}

    # The rows are planned once, and the receipt of the stage names the plan.
    plan = Packing.read(results / "shards/text-bpe/packed-32.json")
    trained = read_json(results / "runs/bpe/packed/train.json")
    assert trained["position"]["packing"] == plan.digest and trained["global_step"] == 15

    # A stage and an exported folder hold their tokenizer.
    exported = export("bpe/first")
    for place in (stages["bpe"], exported):
        model, config = load_model(place, family_module=TOY)
        assert (model.tokens.digest, model.tokens.size, config.width) == (learned.digest, 350, 8)
    assert load_model(stages["bytes"], family_module=TOY)[0].tokens is BYTES
    assert spider("--family-module", TOY, "generate", exported, "--prompt", "Document", "--bytes", 40)
    assert "Nothing to be done" in everything("--dry-run")

    # Another size is another tokenizer, so only the data in its ids and the stages on them are made again.
    everything.config["tokenizers"]["bpe"]["vocab_size"] = 300
    again = everything.planned()
    once = dict.fromkeys(("tokenizer", "encode", "index", "pack"), 1)
    data = ("download", "tokenizer", "encode", "index", "pack", "train")
    assert {rule: again[rule] for rule in data if rule in again} == once | {"train": 2}


def test_a_compressed_model_and_a_task_are_on_the_page_in_the_table_and_in_mlflow(everything, store):
    results = everything.results
    small, page = results / "runs/bpe/packed/compressed", (results / "report/runs/bpe.html").read_text()
    summary = read_json(results / "report/summary.json")["runs"]["bpe"]["stages"]["packed"]["compressed"]
    scored = read_json(small / "evaluation.json")
    assert summary["bpb"] == scored["bpb"]
    size = summary["results"]["compression"]["rows"][0]
    assert size["columns"]["file"]["value"] == (small / "model.spider").stat().st_size
    table = (results / "report/table.md").read_text()
    assert f"| bpe / packed, compressed | {size['value']:,.0f} |" in table and "Compressed model" in page
    sent = model_in(store, "bpe-packed-compressed")
    expected = scored["results"]["adapt"]["rows"][0]["carried"]["value"]
    assert sent["val/compressed/ttt/bpb_carried"] == expected and sent["val/compressed/bytes"] > 0


def test_a_source_and_a_measurement_in_a_file_are_in_the_table_the_page_the_card_and_mlflow(
    everything, export, store
):
    results, card = everything.results, (export("bytes/first") / "README.md").read_text()
    page, table = ((results / "report" / name).read_text() for name in ("runs/bytes.html", "table.md"))
    raw = read_json(results / "raw/words/000.json")
    metadata = read_json(results / "shards/words/metadata.json")
    file = {"part": "000", "name": PARAGRAPHS, "bytes": raw["bytes"], "sha256": raw["sha256"]}
    assert metadata["source"] == {**everything.config["datasets"]["words"]["source"], "files": [file]}
    assert sum(split["documents"] for split in metadata["splits"].values()) == 200 - 4 * 3
    assert "raw/words/000.parquet" in page and f"| words | paragraphs of {PARAGRAPHS} |" in card

    found = read_json(results / "runs/bytes/first/evaluation.json")["results"][VOWELS]
    bits, share = found["rows"]
    assert 0 < bits["value"] < 9 and 0 < share["value"] < 1
    shown, percent = f"{bits['value']:.4f}", f"{100 * share['value']:.1f}%"
    assert "| on vowels, each document alone |" in table and shown in table
    assert "## Letters counted" in table and f"| bytes / first | {percent} |" in table
    assert "<th>on vowels, each document alone</th>" in page and shown in page
    assert f"<th>share of vowels</th><td>{percent}</td>" in page and "Vowels are aeiouy." in page
    assert "on vowels" in card and shown in card
    assert "### Letters counted" in card and f"| share of vowels | {percent} |" in card
    wanted = {"val/vowels/bpb": bits["value"], "val/vowels/share": share["value"]}
    assert wanted.items() <= model_in(store, "bytes-first").items()
    (version,) = store[0].search_model_versions("name = 'bytes'")
    assert version.tags["vowels.share"] == str(share["value"])

    everything.config["runs"]["bpe"]["evaluation"]["measurements"] = {VOWELS: {"letters": "aeiou"}}
    planned = everything.planned()
    assert (planned["evaluate"], planned["evaluate_compressed"]) == (2, 1) and "train" not in planned
    text = everything.folder / PARAGRAPHS
    before, stat = text.read_text(), text.stat()
    text.write_text(before + "\n\nAnother paragraph of five words.")
    assert everything.planned("datasets/words")["download"] == 1
    text.write_text(before)
    os.utime(text, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_page_shows_the_trace_of_a_sample(everything):
    trace = read_json(everything.results / "runs/bytes/first/trace.json")
    page = (everything.results / "report/runs/bytes.html").read_text()
    assert f"{100 * trace['share']:.0f}% of this text stands in the training text" in page
    assert ("Underlined stretches" in page) == bool(trace["stretches"])


def test_what_cleaning_left_out_is_on_the_page_in_the_card_and_in_mlflow(everything, export, store):
    described = read_json(everything.results / "shards/text/metadata.json")
    left_out = {reason: count for reason, count in described["left_out"].items() if count}
    assert left_out.keys() == {"text !~ 'Document 7 '", "contaminated"} and min(left_out.values()) == 1
    assert described["cleaning"] == CLEANING
    words = "1 by text !~ 'Document 7 '"
    page = html.unescape((everything.results / "report/runs/bpe.html").read_text())
    assert words in page and "<th>signatures</th><td>1</td>" in page
    assert words in (export("bpe/first") / "README.md").read_text()
    client, pipeline, _ = store
    found = client.search_runs([pipeline], "tags.`spider.rule` = 'encode'")
    sent = [mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/train/000.json")["rows"] for run in found]
    assert sum(left_out.items() <= rows.get("left_out", {}).items() for rows in sent) == 2


def test_checkpoints_on_the_way_are_rows_and_points_in_mlflow(everything, store):
    folder = everything.results / "runs/bpe"
    scored = {name: read_json(folder / name / "checkpoints.json")["scores"] for name in ("first", "packed")}
    steps = {name: [one["global_step"] for one in found] for name, found in scored.items()}
    assert steps == {"first": [5, 10], "packed": [13, 15]}
    both = [*scored["first"], *scored["packed"]]
    table = (everything.results / "report/table.md").read_text()
    listed = table.split("## Checkpoints, best first, on")[1].replace("*", "").split("| bpe / ")
    ranked = sorted(both, key=lambda one: one["bpb"])
    rows = [f"{one['stage']}, step {one['global_step']} | {one['bpb']:.4f}" for one in ranked]
    assert [row.startswith(own) for row, own in zip(listed[1:], rows, strict=False)] == [True] * 4
    assert "<th>bpe / first, step 5</th>" in (everything.results / "report/runs/bpe.html").read_text()

    client, _, training = store
    (run,) = client.search_runs([training], "tags.`spider.run` = 'bpe'")

    def curve() -> list[tuple[int, float]]:
        points = client.get_metric_history(run.info.run_id, "sample_bpb")
        return sorted((point.step, point.value) for point in points)

    before = {"first": 0, "packed": read_json(folder / "first/train.json")["bytes"]}
    expected = [(before[one["stage"]] + one["training"]["bytes"], one["bpb"]) for one in both]
    assert curve() == expected
    assert model_in(store, "bpe-first-step-5")["sample_bpb"] == both[0]["bpb"]
    versions = client.search_model_versions("name = 'bpe'")
    assert sorted(one.tags["spider.stage"] for one in versions) == ["first", "packed", "packed/compressed"]

    # Scoring again scores no checkpoint and adds no point.
    written = {file: file.stat().st_mtime_ns for file in (folder / "first/scores").glob("*.json")}
    ends = [folder / "first" / name for name in ("evaluation.json", "checkpoints.json")]
    kept = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in ends]
    spider("evaluate", "bpe/first")
    sync = [forkserver.spider(), "track", "sync"]
    subprocess.run(sync, env={**os.environ, "SPIDER_TRACKING": "on"}, check=True, capture_output=True)
    assert {file: file.stat().st_mtime_ns for file in written} == written and curve() == expected
    for path, content, time in kept:  # Tests below expect the files of the workflow.
        path.write_bytes(content)
        os.utime(path, ns=(time, time))


def test_a_foreign_model_is_a_row_of_the_comparison_and_a_run_in_mlflow(finished, everything, store):
    results = everything.results
    foreign = read_json(results / "foreign/gpt2/evaluation.json")
    own = read_json(results / "runs/bytes/first/evaluation.json")
    assert foreign["text_sha256"] == own["text_sha256"] and foreign["lossless"]
    label = "gpt2 (lossless tokenizer of its own)"
    cells = [f"{foreign[name]:.4f}" for name in ("bpb", "bpb_carried")]
    table = (results / "report/table.md").read_text()
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {label}") and cells[0] in line)
    assert cells[1] in line and "16 to 32 ids" in line
    assert label in (results / "report/runs/bpe.html").read_text()
    assert re.search(r"(?m)^gpt2 +[\d.]+ █", finished[1])
    client, _, training = store
    (run,) = client.search_runs([training], "tags.`spider.run` = 'gpt2'")
    assert run.data.metrics["bpb"] == foreign["bpb"]
    assert run.data.metrics["val/bpb_carried"] == foreign["bpb_carried"]
    assert run.data.params["tokenizer"] == "TokenizersBackend" and run.data.params["lossless"] == "true"
    assert run.data.tags["mlflow.source.name"].startswith("spider evaluate --model gpt2")

    # By hand, a folder needs no entry in the configuration, and it may be scored as any stage is.
    spider("evaluate", "bpe/first", "--model", "a gpt2")
    by_hand = read_json(results / "foreign/a-gpt2/evaluation.json")
    assert by_hand["weights"] == foreign["weights"] and by_hand["run"] == "a-gpt2"
    shutil.rmtree(results / "foreign/a-gpt2")


@pytest.fixture
def copied(everything, tmp_path, monkeypatch):
    """Return a copy of the finished workflow, in whose folder a test works."""
    copied = Workflow(shutil.copytree(everything.folder, tmp_path / "copied", symlinks=True))
    monkeypatch.chdir(copied.folder)
    return copied


def test_training_reads_the_index_of_the_split_and_scoring_the_full_one(copied):
    stage = copied.results / "runs/bytes/first"
    folders = {path.parent.name: path.parent for path in copied.results.glob("ngram/*/*/*/index.json")}
    made = {name: open_index(folder) for name, folder in folders.items()}
    assert set(made) == {"split", "full"}
    assert made["split"].description.splits == ["ngram"]
    assert made["full"].description.splits == ["ngram", "train"]
    assert not list(copied.results.glob("ngram/*/*/counts/*")), "merged counts are deleted"

    manifest = read_json(stage / read_json(stage / "train.json")["checkpoint"] / "manifest.json")
    assert manifest["ngram"] == made["split"].description.digest
    assert manifest["full_index"] == made["full"].description.digest
    evaluated = read_json(stage / "evaluation.json")
    assert evaluated["ngram"] == manifest["full_index"]

    # The score is that of the model with the full index.
    model, _ = load_model(stage, family_module=TOY)
    tokens_N, _ = validation_stream(copied.results / "shards/text", 4000)
    again = score(model, clip_stream(tokens_N, 4000), Scoring(seq_len=32)).bpb
    assert again == pytest.approx(evaluated["bpb"], abs=1e-3)
    model.lookup = None
    with pytest.raises(ValueError, match="reads an n-gram index"):
        score(model, tokens_N, Scoring(seq_len=32))

    # A missing or another index is refused.
    shutil.rmtree(folders["full"])
    with pytest.raises(CheckpointError, match="no n-gram index lies there"):
        load_model(stage, family_module=TOY)
    shutil.copytree(folders["split"], folders["full"])
    with pytest.raises(CheckpointError, match="another n-gram index"):
        load_model(stage, family_module=TOY)


def test_the_audit_of_a_finished_run_passes_and_is_shown(finished, everything, export, store):
    results = everything.results
    for name in ("bytes/first", "bpe/packed", "bpe/packed/compressed"):
        found = read_json(results / "runs" / name / "audit.json")
        checks = {one["check"]: one for one in found["findings"]}
        assert found["quick"] == name.startswith("bpe"), name
        assert checks["digests"]["status"] == checks["code"]["status"] == "passed", checks
        audit = "val/compressed/audit" if name.endswith("compressed") else "val/audit"
        sent = model_in(store, name.replace("/", "-"))
        assert sent[f"{audit}/failed"] == 0 < sent[f"{audit}/passed"], name
    assert not (results / "runs/bpe/first/audit.json").exists()
    assert "Audit" in finished[1]
    page = (results / "report/runs/bpe.html").read_text()
    badge = "Audit of packed, compressed: <b>passed</b>. digests, splits, distribution, score, causality, "
    assert f"{badge}replay, code (quick" in page and "Checks of the audit" in page
    assert "bpe / packed, compressed, audit: passed. " in (results / "report/table.md").read_text()
    assert "this model, audit: passed." in (export("bpe/packed") / "README.md").read_text()


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(read_json(path) | changes))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_broken_link_is_found_with_what_depends_on_it(copied):
    root, run = copied.results, copied.results / "runs/bpe"
    stage = run / "packed"
    checkpoint = stage / read_json(stage / "train.json")["checkpoint"]
    digests = ("verify", "bpe/packed", "--only", "digests")
    spoilt = {
        "packed/evaluation.json: is not": (stage / "evaluation.json", lambda path: edit(path, bpb=0.5)),
        "packed/train.json: is not": (stage / "train.json", lambda path: edit(path, loss=0.5)),
        "SHA-256 differs from the manifest": (next(checkpoint.glob("model*.safetensors")), flip),
        "its digest does not match": (checkpoint / "manifest.json", lambda path: edit(path, step=1)),
        "raw/text/000.parquet: is not": (root / "raw/text/000.parquet", flip),
        "text-bpe/train/000.bin: is not": (root / "shards/text-bpe/train/000.bin", flip),
        "packed-32.rows: is not": (root / "shards/text-bpe/packed-32.rows", flip),
        "runs/bpe/first/train.json": (run / "first/train.json", lambda path: edit(path, weights="0" * 16)),
        "tokenizer.json": (root / "tokenizers/bpe/tokenizer.json", flip),
    }
    for reason, (path, spoil) in spoilt.items():
        content = path.read_bytes()
        spoil(path)
        printed = spider(*digests, status=1)
        assert printed.startswith("failed") and reason in printed, (reason, printed)
        path.write_bytes(content)
    assert "runs/bpe/packed/evaluation.json" in printed, "what depends on the tokenizer"
    spider(*digests)
    spider("verify")
    small = stage / "compressed/model.spider"
    content = small.read_bytes()
    flip(small)
    spider(*digests, "--compressed", status=1)
    spider("verify", status=1)
    small.write_bytes(content)

    made = next(job for job in Lineage(root).jobs if job.name == "evaluate bpe/packed")
    code = root / "code" / f"{made.code}.json"
    content = code.read_bytes()
    edit(code, commit="0" * 40)
    printed = spider("audit", "bpe", "--only", "digests", "--only", "code", status=1)
    assert "was edited, so the code of `evaluate bpe/packed` is unknown" in printed
    code.write_bytes(content)

    # Files that were deleted break nothing, and an audit of them says so.
    for path in (root / "raw/text").glob("*.parquet"):
        path.unlink()
    audit = ("audit", "--only", "digests")
    spider(*audit, "bpe", "--quick")
    (found,) = read_json(stage / "audit.json")["findings"]
    assert "raw/text/000.parquet" in " ".join(found["details"]), found

    # An audit of a copy compares its weights, and one of an earlier evaluation is stale.
    spider("checkpoint", "export", run / "first", "other")
    spider("checkpoint", "export", stage, "copy")
    spider(*audit, "copy")
    edit(copied.folder / "other/config.json", stage="packed")
    assert "other: the digest of its weights is" in spider(*audit, "other", status=1)
    assert results_of(StageFolder(stage))["audit"].rows[0].text == "passed"
    spider(*audit, "bpe/packed")
    edit(stage / "evaluation.json", bpb=0.5)
    assert results_of(StageFolder(stage))["audit"].rows[0].text == "stale"
    (stage / "evaluation.json").unlink()
    refused = CliRunner().invoke(cli, ["audit", "bpe/packed"]).exception
    assert "no such file; run `spider evaluate bpe/packed`" in str(refused)


def rules() -> set[str]:
    """Return the names of all rules in the files of the workflow."""
    files = [*(ROOT / "rules").glob("*.smk"), *ROOT.glob("extras/trust/spider_trust/rules/*.smk")]
    text = "\n".join(path.read_text() for path in files)
    return {*re.findall(r"^ *rule (\w+):", text, re.M), *re.findall(r"^ *use rule .* as (\w+)", text, re.M)}


def test_the_record_of_every_job_says_what_snakemake_says(everything):
    printed = everything("--dry-run", "--forceall", "--quiet", "host")
    planned = {}
    for name, block in re.findall(r"^(?:local)?rule (\w+):\n((?:    .+\n)+)", printed, re.M):
        files = [re.findall(rf"^    {kind}: (.+)$", block, re.M) for kind in ("input", "output")]
        names = [line[0].split(", ") if line else [] for line in files]
        read, made = (frozenset(str(everything.folder / name) for name in one) for one in names)
        if made:
            planned[read, made] = name
    elsewhere = {"download_temp", "fetch"}  # test_temp.py and test_presets.py
    drops = {name for name in planned.values() if name.startswith("drop_")}  # one for each dataset
    assert drops and {*planned.values()} == rules() - elsewhere | drops, printed

    def named(files):
        # What is no reason to run a job again (`ancient`) has no content in its record.
        assert all(file.digest for file in files if file.stat)
        return frozenset(str(everything.results / file.path) for file in files)

    recorded = [job for job in jobs(everything.results) if job.outputs[0].stat]
    known = {(named(job.inputs), named(job.outputs)) for job in recorded}
    assert {rule for files, rule in planned.items() if files not in known} == set()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_configuration_and_the_commands_on_a_page_make_the_run_again(workflow, tmp_path, monkeypatch):
    """This run has a tokenizer, packed rows and a compressed model."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    two = add_tokens(workflow)
    del two.config["runs"]["bytes"], two.config["audit"]["bytes"]
    two.config["results"] = "made/here"
    two("made/here/report/runs/bpe.html", patience=1500)
    page = (two.folder / "made/here/report/runs/bpe.html").read_text()
    blocks = [html.unescape(text) for text in re.findall(r'<pre class="code">(.*?)</pre>', page, re.DOTALL)]
    (written,) = (text for text in blocks if "datasets:" in text)
    (listed,) = (text for text in blocks if "spider --config" in text)
    again = tmp_path / "again"
    again.mkdir()
    (again / "run.yaml").write_text(written)
    shutil.copy(two.folder / "text.jsonl", again)
    lines = listed.splitlines()
    words = [line.split()[3:5] for line in lines]
    run = [second if first in ("data", "report") else first for first, second in words]
    once = ["download", "tokenizer", "encode", "index", "pack"]
    assert [rule for rule in run if rule in once] == once
    assert run.count("train") == run.count("evaluate") - 1 == 2
    assert {"compress", "sample", "draw"} < set(run) and "--compressed" in listed
    path = f"{Path(forkserver.spider()).parent}:{os.environ['PATH']}"
    for line in lines:
        subprocess.run(
            line,
            shell=True,
            cwd=again,
            env={**os.environ, "PATH": path, "SPIDER_TRACKING": "off"},
            check=True,
        )
    for name in ("first/train.json", "packed/train.json", "packed/compressed/compress.json"):
        before, after = (read_json(root / "made/here/runs/bpe" / name) for root in (two.folder, again))
        assert before["weights"] == after["weights"]
    figures = re.findall(r"<th>(\w+)</th><td>(\d+)</td>", page.split('id="costs"')[1].split("</table>")[0])
    expected = {rule: str(run.count(rule)) for rule in once} | {"warmup": "1", "train": "2", "draw": "2"}
    expected |= {"evaluate": "3", "sample": "3", "compress": "1", "audit": "2"}
    expected |= {"overlap": "1", "baselines": "1", "stage_baselines": "2"}
    assert dict(figures) == expected | {"all": str(len(lines))}
