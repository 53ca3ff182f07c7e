"""Names that people give to secrets."""

from __future__ import annotations

import re

WORDS = {"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "CREDENTIALS"}


def looks_secret(name: str) -> bool:
    """Return whether a name looks like a secret's: HF_TOKEN and api-key do, max_tokens does not."""
    return not WORDS.isdisjoint(re.split(r"[^A-Z0-9]+", name.upper()))
