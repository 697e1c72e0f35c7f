"""Trust, an extra of Spider: deep checks of a score, and questions about the text that a model has read."""

from pathlib import Path

RULES = Path(__file__).parent / "rules" / "trust.smk"
