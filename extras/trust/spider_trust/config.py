"""The blocks of the configuration that belong to this extra."""

from __future__ import annotations

from typing import Literal

#: ``audit: {RUN: true}``: try to disprove the score of the last stage of these runs, and of their compressed
#: models. ``quick``: on samples, and without training a stretch again. RUN may be a sweep.
Audit = dict[str, bool | Literal["quick"]]
#: ``trace: [DATASET]``: index the training text of these datasets, and trace the samples of stages in it.
Trace = list[str]
