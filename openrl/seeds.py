"""Seeds that are the same in every process."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A seed of its own, in [0, 2**31), for every combination of ``parts``; these are told apart by
    their text. Python's ``hash`` would differ from process to process."""
    key = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") >> 1
