"""What the start of a job costs."""

import subprocess
import sys

CODE = """
import sys
from spider.cli import cli

start = ["--config", "config.yaml", "--log", "log"]
cli([*start, "data", "download", "made", "000", "--output", "000.parquet"], standalone_mode=False)
cli([*start, "data", "encode", "made", "000", "000.parquet"], standalone_mode=False)
print([name for name in ("pandas", "torch", "mlflow") if name in sys.modules])
"""
CONFIG = """
results: results
datasets: {made: {source: {kind: mock}}}
runs: {r: {model: {preset: tiny}, data: made, stages: [{name: s, max_steps: 1}]}}
"""


def test_a_job_on_data_imports_neither_pandas_nor_torch(tmp_path):
    """pyarrow imports pandas for its first conversion, unless it has found none."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
