"""Tracking: spool first, send later.

Every job and trainer writes small JSON files (`spool`); `sync` replays what the MLflow store lacks, as often
as one likes to the same effect. All that sends is a call of it: a process beside the workflow or the trainer,
the end of a job run by hand, ``spider track sync``. So a store that is down, slow or gone costs a job nothing
and loses nothing. Only `store` imports mlflow, when something is sent.
"""

from spider.tracking.records import Run as Job
from spider.tracking.runs import (
    close_pipeline,
    job,
    log_checkpoint,
    log_choice,
    log_hashes,
    log_scores,
    open_pipeline,
    training,
)
from spider.tracking.sync import sync
from spider.tracking.target import configure
