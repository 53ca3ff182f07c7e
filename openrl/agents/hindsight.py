"""What a teacher is told about an answer once it was scored."""

from __future__ import annotations

from collections.abc import Sequence

from openrl.agents.chat import ChatFormat
from openrl.data.privileged import Hints
from openrl.types import PrivilegedContext, Segment, Trajectory


def tell_hindsight(
    hints: Hints, played: Sequence[Trajectory], chat: ChatFormat, limit: int
) -> None:
    """Say in the rows of scored siblings what a teacher reads before each: an answer of another
    sibling that passed, and the feedback on it, of at most ``limit`` tokens each."""

    def encode(text: str) -> list[int]:
        return chat.tokenizer(text, add_special_tokens=False).input_ids

    def cut(text: str) -> str:
        ids, kept = encode(text), limit
        while len(ids) > limit:  # a text may become more tokens than those it was decoded from
            text = chat.tokenizer.decode(ids[:kept])
            ids, kept = encode(text), kept - 1
        return text

    for trajectory in played:
        passed = [t.text for t in played if t is not trajectory and _is_solution(t, trajectory)]
        feedback = trajectory.score.feedback if trajectory.score else ""
        told = {"feedback": cut(feedback.strip()), "solution": cut((passed or [""])[0].strip())}
        for row in trajectory.segments:
            length, text = _begins(row, trajectory)
            said = hints.finish(text, told) if text else None
            read = chat.encode(said) if said else []
            row.privileged = PrivilegedContext(length if read else 0, read)


def _is_solution(other: Trajectory, trajectory: Trajectory) -> bool:
    score = other.score
    return other.agent == trajectory.agent and score is not None and score.passed == 1


def _begins(row: Segment, trajectory: Trajectory) -> tuple[int, str]:
    """Return how many tokens of a row its teacher reads otherwise, and as which text; an empty one
    if it is told nothing."""
    if row.privileged is not None:
        return row.privileged.length, row.privileged.text
    own, told = trajectory.prompt.token_ids, trajectory.prompt.privileged
    if told is None or not own or row.token_ids[: len(own)] != own:
        return 0, ""
    return len(own), told.text
