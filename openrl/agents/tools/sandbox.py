"""A tool that runs Python programs, in the sandbox of the verifiers."""

from __future__ import annotations

from openrl.agents.base import ToolError
from openrl.rewards.verifiers.sandbox import RunLimits, run

LIMITS = RunLimits(seconds=10.0, memory=1 << 30, output=1 << 20)
_FAILED = {
    "timeout": f"the program ran for more than {LIMITS.seconds:g} seconds",
    "memory": "the program needs too much memory",
    "output": "the program prints too much",
}


def python(code: str) -> str:
    """Runs a Python program and returns what it prints. It has no network and writes no files.

    Args:
        code: The whole program; nothing of earlier ones is left.
    """
    ran = run({"mode": "program", "code": code}, LIMITS)
    if ran.outcome != "done":
        last_line = ran.message.strip().rpartition("\n")[2]
        raise ToolError(_FAILED.get(ran.outcome) or last_line or "the program ended early")
    return ran.stdout.decode(errors="replace").rstrip("\n") or "(nothing was printed)"
