"""Track jobs and trainings in MLflow: write records to a spool first, send them later.

Each job and trainer writes small JSON files (`spool`). `sync` sends what the MLflow store lacks, and a second
call changes nothing. A process beside the workflow or the trainer calls it, as do a job that is run by hand
and ``spider track sync``. So a store that is slow or cannot be reached costs a job nothing and loses nothing.
mlflow is imported only to send records.
"""

from spider.tracking.records import Run as Job
from spider.tracking.runs import (
    close_pipeline,
    job,
    log_checkpoint,
    log_choice,
    log_foreign,
    log_scores,
    open_pipeline,
    training,
)
from spider.tracking.sync import sync
from spider.tracking.target import configure
