"""Tracking: spool first, send later.

Every job and trainer writes small JSON files (`spool`); `sync` replays what the MLflow store lacks, as often
as one likes to the same effect. All that sends is a call of it: a process beside the workflow or the trainer,
the end of a job run by hand, ``spider track sync``. So a store that is down, slow or gone costs a job nothing
and loses nothing. Only `store` imports mlflow, when something is sent.
"""

from spider.tracking.jobs import Job, close_pipeline, configure, job, open_pipeline
from spider.tracking.sender import Sender, start_sender
from spider.tracking.sync import SyncReport, sync
from spider.tracking.target import store_uri
from spider.tracking.training import log_checkpoint, log_evaluation, training

__all__ = [
    "Job",
    "Sender",
    "SyncReport",
    "close_pipeline",
    "configure",
    "job",
    "log_checkpoint",
    "log_evaluation",
    "open_pipeline",
    "start_sender",
    "store_uri",
    "sync",
    "training",
]
