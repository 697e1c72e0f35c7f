"""Answer the evaluation's questions and write its samples while a stage trains.

Accuracies go to the curves, under the names that the evaluation gives them. Samples go to the log and to the
folder ``samples`` of the stage. Like a validation, this measures the averaged weights if there are any, and
never changes the weights. Of several processes, the first one works and the others wait.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from spider import files
from spider.evaluation.questions import Task
from spider.evaluation.sample import as_text, written
from spider.evaluation.tasks import read_tasks, run_tasks
from spider.model.reading import Reading
from spider.training.state import Progress
from spider.training.validation import Validation

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Probes:
    """Run the tasks and write the samples of a stage.

    Raises:
        ValueError: A task cannot be read.
    """

    validation: Validation
    samples: Path
    """Folder of the samples."""
    converses: bool
    """Whether the model learns from conversations, in this stage or an earlier one."""

    def __post_init__(self) -> None:
        self.spec = self.validation.spec
        settings = self.spec.settings
        self.tasks: list[Task] = []
        if settings.tasks_every:
            found, notes = read_tasks(self.spec.evaluation, self.converses)
            self.tasks = [one._replace(questions=one.questions[: settings.tasks_items]) for one in found]
            for note in notes:
                log.info("%s", note)

    def due(self, progress: Progress) -> list[bool]:
        """Return whether tasks, and whether samples, are due after this step."""
        settings, last = self.spec.settings, progress.step == progress.end
        every = settings.tasks_every, settings.samples_every
        return [steps > 0 and (last or progress.step % steps == 0) for steps in every]

    def after(self, progress: Progress, tasks: bool, samples: bool) -> dict[str, float]:
        """Run tasks, write samples, and return the metrics; every process has to call this."""
        began = time.perf_counter()
        found = self.validation.world.from_first(lambda: self._measure(progress.global_step, tasks, samples))
        progress.validation_seconds += time.perf_counter() - began
        return found

    def _measure(self, step: int, tasks: bool, samples: bool) -> dict[str, float]:
        spec, model = self.spec, self.validation.model
        reading = Reading(spec.window, batch=spec.evaluation.batch, n_loops=self.validation.n_loops)
        with self.validation.measuring():
            rows = run_tasks(model, self.tasks, reading) if tasks else []
            texts = list(written(model, spec, converses=self.converses)) if samples else []
        for row in rows:
            log.info("step %d: %s %s", step, row.label, row)
        for one in texts:
            log.info("step %d: %r is continued by %r", step, one.prompt, one.text)
        if texts:
            self.samples.mkdir(exist_ok=True)
            files.write_text(self.samples / f"sample-{step:08d}.txt", as_text(texts))
        return {f"val/{row.name}": row.value for row in rows if row.value is not None}
