"""Lab, an extra of Spider: verdicts by pairs of runs, ladders with forecasts, and an online mixer."""

from pathlib import Path

RULES = Path(__file__).parent / "rules" / "lab.smk"
