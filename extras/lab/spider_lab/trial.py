"""Train pairs of runs with the same seed in turn, until the test decides whether the candidate is better.

A run that is there already, under any name and with the same settings, is used as it is. The workflow trains
the others in the same results folder, named ``RUN-seed3``, from a configuration in its folder ``trials``.
"""

from __future__ import annotations

import copy
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from spider.common import files
from spider.common.results import Results
from spider.config import Config, ConfigError, Given, load_config
from spider.config.block import check_name
from spider.config.settings import put, resolve, written_value
from spider.evaluation.noise import Noise, Scored, noise, recipe_of, scored_runs
from spider.provenance.codefiles import ROOT
from spider_lab.sequential import Shown, after
from spider_lab.verdicts import BUDGET, Pair, Verdict, data_of

#: Keys of an evaluation that choose the held-out text.
_TEXT = ("max_bytes", "largest_group")


def with_change(config: Config, baseline: str, changes: Sequence[str]) -> tuple[Config, str]:
    """Return a configuration with a run that has some changed settings, and the name of this candidate.

    Args:
        changes: settings as ``model.softcap=null``. They apply to all stages.

    Raises:
        ConfigError: a setting does not exist or has a wrong value, or is the seed.
    """
    plain = copy.deepcopy(config.written)
    config.run(baseline)
    block = copy.deepcopy(plain["runs"][baseline])
    labels = [baseline]
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text}: is not a setting; write KEY=VALUE, such as model.softcap=null")
        if key == "seed":
            raise ConfigError(f"{text}: both runs of a pair have the same seed; compare other settings")
        given = Given(text, key, value)
        path = resolve(text, key, block)
        put(block, path, given.value)
        label = "_".join(path[1:] or path)
        try:
            labels.append(label + written_value(given.value))
        except ConfigError:
            labels.append(f"{label}-{files.digest(given.value)[:8]}")
    name = "-".join(labels)
    check_name(name)
    plain["runs"][name] = block
    return load_config(plain), name


class Trial:
    """A baseline and a candidate of one configuration.

    Raises:
        ValueError: both have the same settings, or they are scored on different text.
    """

    def __init__(self, config: Config, results: Results, names: tuple[str, str], changes: Sequence[str] = ()):
        self.config, self.results, self.names, self.changes = config, results, names, [*changes]
        self.recipes = (recipe_of(config, names[0]), recipe_of(config, names[1]))
        if self.recipes[0] == self.recipes[1]:
            raise ValueError(f"{names[0]} and {names[1]} have the same settings, apart from the seed")
        texts = [self._text(name) for name in names]
        if texts[0] != texts[1]:
            raise ValueError(
                f"{names[0]} and {names[1]} are scored on different held-out text, so their scores do not "
                f"compare; give both the same evaluation.data, {' and '.join(_TEXT)}"
            )

    def _text(self, run: str) -> list[Any]:
        settings = self.config.run(run).evaluation
        data = self.config.raw(settings.data or self.config.run(run).dataset)
        return [data, *(getattr(settings, key) for key in _TEXT)]

    @property
    def data(self) -> dict[str, str]:
        return data_of(self.config, self.results, *self.names)

    def warnings(self) -> Iterator[str]:
        """Yield what a reader of the verdict should know."""
        learned = []
        for name in self.names:
            stage = self.config.run(name).stages[-1].name
            learned.append(sorted({self.config.raw(one) for one in self.config.learned(name, stage)}))
        if learned[0] != learned[1]:
            yield f"trained on different data: {', '.join(learned[0])} and {', '.join(learned[1])}"

    def recorded(self, verdicts: Sequence[Verdict]) -> Verdict | None:
        """Return the newest final verdict on these settings and this data."""
        data = self.data
        for one in reversed(verdicts):
            same = (one.baseline_recipe, one.candidate_recipe) == self.recipes
            if same and one.final and not one.changed(data):
                return one
        return None

    # ------------------------------------------------------------------------------------------------- pairs

    def decide(
        self,
        *,
        most: int,
        budget: float | None,
        options: Sequence[str],
        say: Callable[[str], object],
    ) -> Verdict:
        """Train pairs until the test decides, and return the verdict. A failed workflow is a verdict too.

        Args:
            most: largest number of pairs.
            budget: seconds to train for (None: as long as it takes). The last pair may take longer.
            options: options of Snakemake.
            say: is called with a line about each pair.

        Raises:
            ValueError: no pair is trained, or runs of one recipe were trained or scored on different text.
        """
        began, longest = time.monotonic(), 0.0
        pairs: list[tuple[Scored, Scored]] = []
        trained: list[Scored] = []
        shown: Shown | None = None
        known = scored_runs(self.results)
        earlier: Noise | None = None
        reason = f"all {most} pairs"
        for seed in itertools.islice(self._seeds(known), most):
            names = [self._run(side, seed, known) for side in (0, 1)]
            there = {one.run for one in known if one.recipe in self.recipes}
            if missing := [name for name in names if name not in there]:
                spent = time.monotonic() - began
                if budget is not None and spent + longest >= budget:
                    say(f"seed {seed}: {' and '.join(missing)} not trained, {BUDGET}")
                    reason = BUDGET
                    break
                now = time.time()
                if status := self._train(seed, missing, options):
                    problem = f"Snakemake ended with status {status}"
                    if not self._began(missing, now):
                        raise ValueError(f"{problem} before a job of {' or '.join(missing)} began")
                    problem = f"{' or '.join(missing)} failed: {problem}"
                    return self._verdict(pairs, trained, shown, earlier, problem, failed=True)
                longest = max(longest, time.monotonic() - began - spent)
                known = scored_runs(self.results)
            one, other = (self._scored(name, side, known) for side, name in enumerate(names))
            trained += [run for run in (one, other) if run.run in missing]
            pairs.append((one, other))
            self._check_text(pairs)
            earlier = earlier or self._noise(known, one.text)
            shown = after([b.bpb - a.bpb for a, b in pairs], earlier, most)
            change = f"{other.bpb - one.bpb:+.4f}; so far {shown.outcome}"
            say(f"seed {seed}: {one.run} {one.bpb:.4f}, {other.run} {other.bpb:.4f}, {change}")
            if shown.stops:
                reason = "decided" if shown.outcome != "not shown" else "more pairs would hardly decide it"
                break
        if not pairs:
            both = " and ".join(self.names)
            raise ValueError(f"no seed is trained of both {both}; give a --budget to train some")
        return self._verdict(pairs, trained, shown, earlier, reason)

    def _seeds(self, known: Sequence[Scored]) -> Iterator[int]:
        """Yield seeds: first those that are trained of both, then of the baseline, then further ones."""
        own = self.config.run(self.names[0]).seed
        of = [{one.seed for one in known if one.recipe == recipe} for recipe in self.recipes]
        first = dict.fromkeys(
            [*sorted(of[0] & of[1]), *([own] if own in of[0] else []), *sorted(of[0] | of[1])]
        )
        yield from first
        yield from (seed for seed in itertools.count(own) if seed not in first)

    def _run(self, side: int, seed: int, known: Sequence[Scored]) -> str:
        """Return the name of the run of a side with a seed, which may have to be trained."""
        recipe, name = self.recipes[side], self.names[side]
        same = [run for run, block in self.config.runs.items() if block.seed == seed]
        named = [run for run in same if recipe_of(self.config, run) == recipe]
        named.sort(key=lambda run: run != name)
        there = [one.run for one in known if (one.recipe, one.seed) == (recipe, seed)]
        if found := [run for run in named if run in there] + there + named:
            return found[0]
        if (new := f"{name}-seed{seed}") in self.config.runs:
            raise ValueError(f"runs.{new}: has other settings than {name}; give one of them another name")
        return new

    def _train(self, seed: int, missing: Sequence[str], options: Sequence[str]) -> int:
        """Train and score the missing runs of a seed by the workflow, and return its status."""
        written = self.config.written
        runs = dict(written["runs"])
        for run, name in itertools.product(missing, self.names):
            if run == f"{name}-seed{seed}":
                runs[run] = {**runs[name], "seed": seed}
        plain = {key: value for key, value in written.items() if key != "foreign"} | {"runs": runs}
        targets = [self.results.stage(run, runs[run]["stages"][-1]["name"]).evaluation for run in missing]
        return run_workflow(plain, self.results.root / f"trials/{self.names[1]}.yaml", targets, options)

    def _began(self, runs: Sequence[str], since: float) -> bool:
        """Return whether a job of some runs has written a log since a time, in seconds since 1970."""
        logs = self.results.root / "logs"
        paths = [path for run in runs for form in (f"*/{run}*", f"*/{run}/*") for path in logs.glob(form)]
        return any(path.stat().st_mtime >= since for path in paths)

    def _scored(self, run: str, side: int, known: Sequence[Scored]) -> Scored:
        found = next((one for one in known if one.run == run), None)
        if found is None or found.recipe != self.recipes[side]:
            raise ValueError(f"{run}: was not trained with the settings of {self.names[side]}; move it away")
        return found

    def _check_text(self, pairs: Sequence[tuple[Scored, Scored]]) -> None:
        """Raise `ValueError` if runs were scored on different text, or those of a side trained on it."""
        columns = [*zip(*pairs, strict=True)]
        checks = [("scored", {one.text: one.run for pair in pairs for one in pair})]
        checks += [("trained", {one.data: one.run for one in column}) for column in columns]
        for what, found in checks:
            if len(found) > 1:
                one, other, *_ = found.values()
                raise ValueError(f"{one} and {other} were {what} on different text; train both again")

    def _noise(self, known: Sequence[Scored], text: str) -> Noise | None:
        """Return the noise of a seed in other runs that were scored on a text.

        Runs of the baseline and the candidate are not among them, because the pairs show their noise.
        """
        return noise(one for one in known if one.text == text and one.recipe not in self.recipes)

    def _verdict(
        self,
        pairs: list[tuple[Scored, Scored]],
        trained: list[Scored],
        shown: Shown | None,
        earlier: Noise | None,
        reason: str,
        *,
        failed: bool = False,
    ) -> Verdict:
        finite = shown is not None and math.isfinite(shown.low)
        return Verdict(
            time=time.time(),
            baseline=self.names[0],
            candidate=self.names[1],
            change=self.changes,
            baseline_recipe=self.recipes[0],
            candidate_recipe=self.recipes[1],
            data=self.data,
            outcome="failed" if failed else shown.outcome if shown else "not shown",  # type: ignore[arg-type]
            reason=reason,
            difference=shown.difference if shown else None,
            interval=(shown.low, shown.high) if shown and finite else None,
            pairs=[
                Pair(seed=a.seed, runs=(a.run, b.run), weights=(a.weights, b.weights), bpb=(a.bpb, b.bpb))
                for a, b in pairs
            ],
            noise=earlier.deviation if earlier else None,
            trainings=len(trained),
            seconds=sum(one.seconds for one in trained),
        )


def run_workflow(plain: dict[str, Any], file: Path, targets: Sequence[Path], options: Sequence[str]) -> int:
    """Write a configuration to a file, make some targets of it, and return the status of Snakemake.

    After Ctrl-C, which Snakemake receives as well, wait until it has ended.

    Args:
        options: further options of Snakemake.
    """
    files.write_text(file, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
    command += ["--configfile", str(file), *options, "--", *map(str, targets)]
    with subprocess.Popen(command, stdout=sys.__stderr__) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
