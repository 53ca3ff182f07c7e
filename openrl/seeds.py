"""Seeds that do not depend on the process that computes them."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """Return a seed in [0, 2**31) derived from the texts of ``parts``, so that every combination
    has its own. Python's ``hash`` would differ from process to process."""
    key = "/".join(map(str, parts))
    text = key.encode(errors="backslashreplace")  # a name may hold half a surrogate pair
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1
