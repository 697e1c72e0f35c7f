"""Tracking: spool first, send later.

Every job and trainer writes small JSON files (`spool`); `sync` replays what the MLflow store lacks, as often
as one likes to the same effect. All that sends is a call of it: a process beside the workflow or the trainer,
the end of a job run by hand, ``spider track sync``. So a store that is down, slow or gone costs a job nothing
and loses nothing. Only `store` and `explain` import mlflow, when something is sent.
"""

from spider.tracking.jobs import close_pipeline, job, open_pipeline
from spider.tracking.records import Run as Job
from spider.tracking.sync import sync
from spider.tracking.target import configure
from spider.tracking.training import log_checkpoint, log_evaluation, training

__all__ = [
    "Job",
    "close_pipeline",
    "configure",
    "job",
    "log_checkpoint",
    "log_evaluation",
    "open_pipeline",
    "sync",
    "training",
]
