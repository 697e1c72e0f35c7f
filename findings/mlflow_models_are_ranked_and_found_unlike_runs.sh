#!/usr/bin/env bash
# MLflow's search of models ranks NaN first and finds a model by any value of its past; its search of runs does neither.
#
# Guess:     `search_logged_models` treats metrics as `search_runs` does: NaN ranks last in both directions, and a filter
#            compares the last value of a metric.
# Behaviour: the SQL store keeps a NaN of a model as 0, so that it is the best loss, and `model.metrics` shows 0.0. A
#            filter takes every value that was ever logged: a model whose loss rose from 0.5 to 3.0 has `loss < 1`. It
#            ranks by the last value, though. For the runs of the same points both are as guessed.
# Seen with: mlflow 3.17.2 on Python 3.11, SQLite:
#            by loss: models nan good bad, runs good bad nan
#            loss < 1.2: models nan good bad, runs good
#            the last loss of nan: 0.0 of the model, nan of the run
# Takes some minutes, for the installation. Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check mlflow==3.17.2
cat > search.py <<'PYTHON'
import math
import sys

import mlflow
from mlflow.entities import Metric

mlflow.set_tracking_uri("sqlite:///mlflow.db")
client = mlflow.MlflowClient()
experiment = client.create_experiment("losses")
runs = {}
for name, losses in {"good": [2.0, 1.0], "bad": [0.5, 3.0], "nan": [1.5, math.nan]}.items():
    runs[name] = client.create_run(experiment, run_name=name).info.run_id
    model = mlflow.create_external_model(name=name, source_run_id=runs[name], experiment_id=experiment)
    for step, loss in enumerate(losses):
        point = Metric("loss", loss, 1000 + step, step, model_id=model.model_id)
        client.log_batch(runs[name], metrics=[point])


def models(filter_string=None, order_by=None):
    return [model.name for model in client.search_logged_models([experiment], filter_string, order_by=order_by)]


def names(filter_string="", order_by=None):
    return [run.info.run_name for run in client.search_runs([experiment], filter_string, order_by=order_by)]


ranked = models(order_by=[{"field_name": "metrics.loss", "ascending": True}]), names(order_by=["metrics.loss"])
found = sorted(models("metrics.loss < 1.2"), key="nan good bad".split().index), names("metrics.loss < 1.2")
(last,) = (model for model in client.search_logged_models([experiment]) if model.name == "nan")
of_model = {metric.step: metric.value for metric in last.metrics}[1]
of_run = client.get_run(runs["nan"]).data.metrics["loss"]
print(f"by loss: models {' '.join(ranked[0])}, runs {' '.join(ranked[1])}")
print(f"loss < 1.2: models {' '.join(found[0])}, runs {' '.join(found[1])}")
print(f"the last loss of nan: {of_model} of the model, {of_run} of the run")
expected = (["nan", "good", "bad"], ["good", "bad", "nan"]), (["nan", "good", "bad"], ["good"])
sys.exit(not ((ranked, found) == expected and of_model == 0 and math.isnan(of_run)))
PYTHON
MLFLOW_DISABLE_TELEMETRY=true env/bin/python search.py 2> /dev/null
