"""Leave secrets out of what is written or sent."""

from __future__ import annotations

import os
import re
from typing import Any

_SECRET_NAME = re.compile(
    r"passw|secret|credential|api_?key|access_?key|private_?key|authori[sz]ation|(?<!per )token$", re.I
)
_SECRET_TEXT = {
    r"(://)[^/\s:@]*:[^/\s@]*@": r"\1***@",
    r"(?i)\b(https?://)[^/\s@?#]+@": r"\1***@",  # a token, while the address of a database may name a user
    r"(?i)\b(bearer|basic)\s+[\w.~+/-]{8,}=*": r"\1 ***",
    r"\b(?:hf_|gh[pousr]_|github_pat_|sk-|glpat-|xox[bap]-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b": "***",
}
#: A setting in a text. Code has such assignments too.
_SECRET_SETTING = {r"(?i)((?:password|passwd|secret|api_?key|token)[=:]\s*)[^\s&'\",;]+": r"\1***"}


def redact(value: Any, *, settings: bool = True) -> Any:
    """Return ``value`` without secrets: values of secret keys, texts like tokens, secrets of the environment.

    With ``settings``, texts such as ``password=...`` lose their value too. Numbers like ``tokens: 5000`` and
    ``eos_token: 258`` stay, and so does a column ``by nats per token``.
    """
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= 8]
    patterns = _SECRET_TEXT | (_SECRET_SETTING if settings else {})
    secrets.sort(key=len, reverse=True)  # a longer secret may contain a shorter one

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: "***" if _is_secret(str(k), v) else clean(v) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v) for v in value]
        if not isinstance(value, str):
            return value
        for secret in secrets:
            value = value.replace(secret, "***")
        for pattern, replacement in patterns.items():
            value = re.sub(pattern, replacement, value)
        return value

    return clean(value)


def _is_secret(name: str, value: Any) -> bool:
    if not _SECRET_NAME.search(name) or value is None or isinstance(value, bool):
        return False
    return not (name.lower().endswith("token") and isinstance(value, (int, float)))
