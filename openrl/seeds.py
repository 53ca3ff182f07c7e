"""Seeds that do not depend on the process that computes them."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """Return a seed in [0, 2**31) for this combination of ``parts``, compared by their text.
    Python's ``hash`` would differ from process to process."""
    key = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") >> 1
