"""Plays OpenRLHF's AgentInstance in the process of its file."""

from __future__ import annotations

from typing import Any

from openrl.agents.base import Step
from openrl.agents.files import user_code
from openrl.agents.files.environments import EnvironmentAdapter
from openrl.compat.shared.raw_text import adapt_raw_text, content, text_of, value_of


def adapt(made: type) -> EnvironmentAdapter:
    return adapt_raw_text(made, read)


def read(found: Any) -> tuple[Step, Any]:
    """Read the dict that ``step`` returned. Raises TypeError if it has another form."""
    text = text_of(value_of(found, "environment_feedback", "step"))
    reward = user_code.scalar(value_of(found, "rewards", "step"), "the reward")
    step = Step(
        content(text, found.get("environment_images", found.get("images"))),
        reward=reward,
        done=bool(value_of(found, "done", "step")),
        passed=user_code.verdict(found.get("scores"), reward),
        metrics=user_code.numbers(found.get("extra_logs")),
        feedback=user_code.feedback(found.get("extra_logs")),
    )
    return step, found.get("sampling_params")
