"""Validate the crates of all finished runs in ``results`` with the validators of both formats.

`roc-validator` and `mlcroissant` must be installed. The first reads the context of RO-Crate from the network.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from spider.config import load_config
from spider.provenance.lineage import Lineage
from spider.publish.crate import crate
from spider.results import NEWEST, Results


def measure_crate() -> None:
    """Print a row for each run: what both validators found that their formats require."""
    import mlcroissant
    from rocrate_validator import models, services

    root = Path("results")
    config, lineage = load_config(root / NEWEST), Lineage(root)
    print(f"{'run':24} {'files':>5} {'ro-crate-1.1':>14} {'process-run-crate-0.5':>22} {'croissant':>10}")
    for name, run in config.runs.items():
        stage = run.stages[-1].name
        if not Results(root).stage(name, stage).evaluation.is_file():
            continue
        with tempfile.TemporaryDirectory() as folder:
            files = crate(config, lineage, name, stage, Path(folder))
            issues = []
            for profile in ("ro-crate-1.1", "process-run-crate-0.5"):
                settings = services.ValidationSettings(
                    rocrate_uri=folder,
                    profile_identifier=profile,
                    requirement_severity=models.Severity.REQUIRED,
                )
                issues.append(len(services.validate(settings).get_issues()))
            errors = 0
            for path in Path(folder).glob("croissant-*.json"):
                errors += len(mlcroissant.Dataset(jsonld=path).metadata.ctx.issues.errors)
            print(f"{name:24} {len(files):5} {issues[0]:14} {issues[1]:22} {errors:10}", flush=True)
