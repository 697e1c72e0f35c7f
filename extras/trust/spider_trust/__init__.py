"""Trust, an extra of Spider."""

from pathlib import Path

RULES = Path(__file__).parent / "rules" / "trust.smk"
