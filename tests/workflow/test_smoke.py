"""The smoke preset runs from end to end, with tracking, as a new user runs it."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from spider.cli import cli
from spider.common.files import read_json
from spider.report.page import FIGURES
from tests.forkserver import python, spider

from .conftest import PATIENCE, ROOT, SNAKEMAKE


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[Path, str]:
    """Return the results folder and what the workflow printed, on the pages of `docs/`, a small text."""
    folder = tmp_path_factory.mktemp("smoke")
    sections = [
        part for page in sorted((ROOT / "docs").glob("*.md")) for part in page.read_text().split("\n## ")
    ]
    (folder / "pages.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sections))
    plain = yaml.safe_load((ROOT / "presets/smoke.yaml").read_text())
    source = {"kind": "local", "files": ["pages.jsonl"]}
    plain["datasets"] = {"pages": {"source": source, "validation": 0.1}}
    plain["runs"]["smoke"]["data"] = "pages"
    (folder / "smoke.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
    command = [python(), SNAKEMAKE, "--snakefile", ROOT / "Snakefile", "--profile", ROOT / "profiles/default"]
    command += ["--cores", "2", "--configfile", folder / "smoke.yaml"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW", "SPIDER"))}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=PATIENCE, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "results/smoke", done.stdout


def test_the_summary_has_scores_baselines_and_seconds(smoke):
    summary = read_json(smoke[0] / "report/summary.json")
    stages = summary["runs"]["smoke"]["stages"]
    assert list(stages) == summary["runs"]["smoke"]["order"] == ["warmup", "main", "anneal"]
    for stage in stages.values():
        assert 0 < stage["bpb"] <= stage["bpb_strict"] < 9
        assert stage["steps"] > 0 and stage["bytes"] > 0 and stage["seconds"] > 0
    rows = {row["label"]: row for row in stages["anneal"]["results"]["baselines"]["rows"]}
    rates = {label: (row.get("value"), row["carried"]["value"]) for label, row in rows.items()}
    packing = {"xz", "zstd", "brotli"} | ({"zpaq"} & {*rates})
    assert {*rates} == {"ppmd", "ppmd given all", "ppmd given stage"} | packing | {
        f"{name} given stage" for name in packing
    }
    for label, (alone, carried) in rates.items():
        assert (alone is not None) == label.startswith("ppmd") and 1 < carried < (alone or 8) <= 8
        assert ("outside overlap" in rows[label]["columns"]) == label.startswith("ppmd")
    assert min(rates, key=lambda label: rates[label][0] or 8) == "ppmd given all"
    copied = [stage["results"]["overlap"]["metrics"]["overlap/share"] for stage in stages.values()]
    assert all(0 <= share < 0.5 for share in copied)
    rules = {"download", "encode", "index", "warmup", "train", "evaluate"}
    rules |= {"overlap", "baselines", "stage_baselines"}
    assert rules <= set(summary["seconds_by_rule"])


def test_every_stage_has_figures_from_inside_the_model(smoke):
    for stage in ("warmup", "main", "anneal"):
        folder = smoke[0] / "runs/smoke" / stage
        for name in ("inside.svg", "boundaries.html"):
            assert (folder / name).stat().st_size > 2_000, name
        found = read_json(folder / "evaluation.json")
        (curve,) = found["results"]["loops"]["figures"]
        assert len(curve["values"]) == 4 and all(0 < bpb < 9 for bpb in curve["values"])
        assert sum(found["results"]["segments"]["figures"][0]["counts"]) > 1000


def test_the_terminal_has_the_scores_and_the_next_commands_and_the_page_all_stages_and_rules(smoke):
    printed = "".join(smoke[1].split())  # The terminal summary wraps long commands.
    shown = ("that was given the same text, smoke needs", "ppmd given all", "smoke writes: ", "All tables")
    shown += ("spider --config smoke.yaml track ui",)
    assert all("".join(text.split()) in printed for text in shown)
    assert "makeui" not in printed, "the working directory has no Makefile"
    page = (smoke[0] / "report/runs/smoke.html").read_text()
    assert all(f"<th>{stage}" in page for stage in ("warmup", "main", "anneal"))
    assert "not finished" not in page and "broken" not in page.split("</style>")[1]
    assert all(f"<th>{rule}</th>" in page for rule in ("download", "encode", "warmup", "train", "evaluate"))


def test_mlflow_holds_the_whole_run(smoke):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{smoke[0] / 'mlflow.db'}")
    ids = {e.name: e.experiment_id for e in client.search_experiments()}
    jobs = client.search_runs([ids["Pipeline"]])
    parents = [run for run in jobs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1 and len(jobs) == 24  # 23 jobs and their invocation
    assert all(run.info.status == "FINISHED" for run in jobs)
    (training,) = client.search_runs([ids["Training"]])
    curve = client.get_metric_history(training.info.run_id, "train/loss")
    steps = [point.step for point in curve]
    assert steps == sorted(set(steps)) and steps[-1] == 80
    for curve in ("train/epoch", "train/tokens", "train/precision_bits"):
        assert [point.step for point in client.get_metric_history(training.info.run_id, curve)] == steps
    mlflow.set_tracking_uri(f"sqlite:///{smoke[0] / 'mlflow.db'}")
    models = mlflow.search_logged_models(experiment_ids=[ids["Training"]], output_format="list")
    scored = {m.name: [x.value for x in m.metrics if x.key == "bpb"] for m in models}
    ends = {name for name, values in scored.items() if values}
    assert ends == {"smoke-warmup", "smoke-main", "smoke-anneal"} and len(scored) > len(ends)
    assert client.get_model_version_by_alias("smoke", "best").tags["spider.stage"] == "anneal"
    loaded = mlflow.pyfunc.load_model("models:/smoke@best")
    (row,) = loaded.predict(["The model"], params={"max_bytes": 10}).to_dict("records")
    assert row["text"] and 0 < row["bits_per_byte"] < 9
    for stage in ("warmup", "main", "anneal"):
        at_loops = client.get_metric_history(training.info.run_id, f"val/bpb_at_loops/{stage}")
        assert [point.step for point in at_loops] == [1, 2, 3, 4]
        shown = {file.path for file in client.list_artifacts(training.info.run_id, stage)}
        assert {f"{stage}/{name}" for name in (*FIGURES, "sample.txt", "evaluation.json")} <= shown


def test_a_store_made_again_from_the_folder_has_the_same_content(smoke, tmp_path):
    from tests.unit.tracking.conftest import content

    before, again = (f"sqlite:///{folder}/mlflow.db" for folder in (smoke[0], tmp_path))
    command = [spider(), "--config", smoke[0] / "config.yaml", "track", "sync"]
    environment = os.environ | {"MLFLOW_TRACKING_URI": again}
    folder = smoke[0].parent.parent  # in which the paths of the configuration begin
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert content(again) == content(before)


def test_every_block_of_using_a_model_runs(smoke, tmp_path):
    """The blocks of docs/using-a-model.md run on the smoke run's last stage, without a network."""
    page = (ROOT / "docs/using-a-model.md").read_text()
    (tmp_path / "results").symlink_to(smoke[0])
    page = page.replace("spider-ngram/anneal", "results/runs/smoke/anneal").replace(
        "models:/spider-ngram", "models:/smoke"
    )
    blocks = re.findall(r"```(bash|python)\n(.*?)```", page, re.DOTALL)
    assert [kind for kind, _ in blocks].count("python") == 5
    shell = "\n".join(text for kind, text in blocks if kind == "bash")
    path = [Path(spider()).parent, SNAKEMAKE.parent, os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, path))}
    subprocess.run(["bash", "-ec", shell], cwd=tmp_path, env=environment, check=True, timeout=PATIENCE)
    code = "\n".join(f"exec({text!r}, {{}})" for kind, text in blocks if kind == "python")
    done = subprocess.run(
        [python(), "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "generated_text" in done.stdout and "bits_per_byte" in done.stdout
    assert (tmp_path / "my-model-tuned/model.safetensors").exists()


def test_shards_verify_and_describe_themselves(smoke):
    shards = smoke[0] / "shards/pages"
    done = CliRunner().invoke(cli, ["data", "verify", str(shards)])
    assert done.exit_code == 0, done.output
    assert json.loads(CliRunner().invoke(cli, ["data", "inspect", str(shards), "--json"]).stdout)
    source = read_json(shards / "metadata.json")["source"]
    assert [len(file["sha256"]) for file in source["files"]] == [64]
