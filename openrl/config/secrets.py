"""Names under which people keep what nobody else is to see."""

from __future__ import annotations

import re

WORDS = {"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "CREDENTIALS"}


def looks_secret(name: str) -> bool:
    """HF_TOKEN, api-key, but not max_tokens."""
    return not WORDS.isdisjoint(re.split(r"[^A-Z0-9]+", name.upper()))
