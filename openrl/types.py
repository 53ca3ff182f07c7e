"""The nouns: every record that travels between the parts of openrl, with its shapes.

Letters: L tokens of one segment, G trajectories of one group. What a training step makes of them,
in tensors, is in ``openrl.experience``.

One alignment everywhere: a per-token field describes *the token at its own index*. So ``logprobs[b,
t] = log p(token_ids[b, t] | token_ids[b, :t])``, index 0 has no prediction and is never trained.
The only shift by one lives in ``openrl.models.logprobs``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self

Message = dict[str, Any]
"""A message of a chat, as chat templates take it: "role", "content" and what a template knows
besides."""


class End(str, Enum):
    """Why a completion or a trajectory ended."""

    STOP = "stop"  # end-of-text token, a stop text, or the environment says that it is over
    LENGTH = "length"  # ran out of tokens
    MAX_TURNS = "max_turns"  # ran out of turns
    TIMEOUT = "timeout"  # ran out of time
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"
    INTERRUPTED = "interrupted"  # given up before it was over

    @property
    def is_failure(self) -> bool:
        """The infrastructure failed, not the policy: no reward can be right, so none is given."""
        return self in (End.ENVIRONMENT_ERROR, End.ENGINE_ERROR, End.INTERRUPTED)

    @property
    def is_truncated(self) -> bool:
        """The policy would have gone on."""
        return self in (End.LENGTH, End.MAX_TURNS, End.TIMEOUT)


@dataclass(frozen=True)
class Sampling:
    """How one completion is drawn. ``seed`` None leaves the choice to the engine."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    # most tokens of prompt and completion together; None: as many as the engine takes
    max_len: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Image:
    """A picture as engine and trainer both get it: RGB, brought to size once. Equal hashes are
    equal pictures."""

    data: bytes = field(repr=False, compare=False)  # encoded, as a file
    sha256: str


@dataclass(frozen=True)
class PlacedImage:
    """An image in a token row: its tokens are [start, end). An engine gets ``placeholder`` in their
    place, and expands it itself."""

    image: Image
    start: int
    end: int
    placeholder: tuple[int, ...]

    def moved(self, by: int) -> PlacedImage:
        return replace(self, start=self.start + by, end=self.end + by)


@dataclass(frozen=True)
class Prompt:
    """One row of the data, tokenised. Example: ``Prompt("train:17", [5, 9], "3 4 -> 7:",
    label="7")``."""

    id: str  # unique in a run, stable over epochs and resumes
    token_ids: list[int]
    text: str
    label: Any = None  # whatever --label_key holds, handed to rewards unchanged
    messages: tuple[Message, ...] = ()  # what ``text`` was rendered from, if it was a chat
    source: str = "default"  # data source or tag; splits metrics
    difficulty: float | None = None  # in [0, 1], the column --difficulty_key
    images: tuple[PlacedImage, ...] = ()  # in their order in ``token_ids``
    meta: dict[str, Any] = field(default_factory=dict)
    shown: bool = False  # people want to see the turns of its episodes


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) were sampled by the weights of one publish. Example:
    ``VersionSpan(0, 12, version=3)``."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class Completion:
    """An engine's reply to one request."""

    token_ids: list[int]  # [n] sampled tokens, the end-of-text token included
    logprobs: list[float]  # [n] of the sampled tokens, at the sampling temperature
    end: End
    versions: tuple[VersionSpan, ...]  # one behind the other, over all n tokens


@dataclass(frozen=True)
class Score:
    """A reward's reply for one trajectory."""

    reward: float  # what advantages are made of
    passed: float | None = None  # in [0, 1], for filtering and pass rates; None = unknown
    parts: dict[str, float] = field(default_factory=dict)  # named components, logged
    # [L] process rewards, of the segments one behind the other
    token_rewards: list[float] | None = None
    attempts: int = 1  # calls that were made for it, retries included
    # why the reward's sources gave none; then it is 0 or, to be dropped, NaN
    failure: str | None = None

    @property
    def dropped(self) -> bool:
        """The trajectory takes no part in training and statistics."""
        return math.isnan(self.reward)


@dataclass
class Segment:
    """One token row to train on: a prompt, and what was sampled and observed after it."""

    token_ids: list[int]  # [L] prompt first
    loss_mask: list[bool]  # [L] True on tokens that the policy sampled
    rollout_logprobs: list[float]  # [L] from the engine, 0.0 where loss_mask is False
    versions: tuple[VersionSpan, ...] = ()  # over the sampled tokens of the row
    state: str | None = None  # key of the observation that it answers; None: that of its prompt
    images: tuple[PlacedImage, ...] = ()  # in their order in ``token_ids``

    @property
    def context_length(self) -> int:
        """Tokens before the first sampled one; all of them if there is none."""
        return self.loss_mask.index(True) if True in self.loss_mask else len(self.token_ids)

    @property
    def sampled_ids(self) -> list[int]:
        return [i for i, mine in zip(self.token_ids, self.loss_mask, strict=True) if mine]

    @classmethod
    def answer(
        cls,
        prompt_ids: list[int],
        token_ids: list[int],
        logprobs: list[float] | None = None,
        versions: tuple[VersionSpan, ...] = (),
        images: tuple[PlacedImage, ...] = (),
    ) -> Self:
        """A prompt and the tokens sampled after it; ``versions`` counts from the first of these.
        Without ``logprobs`` nobody has measured them, and they are 0."""
        before, sampled = len(prompt_ids), len(token_ids)
        return cls(
            token_ids=[*prompt_ids, *token_ids],
            loss_mask=[False] * before + [True] * sampled,
            rollout_logprobs=[0.0] * before + (logprobs or [0.0] * sampled),
            versions=tuple(
                replace(s, start=s.start + before, end=s.end + before) for s in versions
            ),
            images=images,
        )


@dataclass(frozen=True)
class Shown:
    """A turn for people: what the policy saw, and what it did. The last one of an episode has seen
    its end and done nothing."""

    messages: tuple[Message, ...]  # new in this turn
    frame: Any | None = None  # uint8 (height, width, 3)
    action: str | None = None
    reward: float = 0.0


@dataclass
class Trajectory:
    """One playing of a prompt. Usually one segment; an agent whose context does not only grow
    leaves several. Example: ``Trajectory(prompt, [Segment([5, 9, 7], ...)], End.STOP, "7")``."""

    prompt: Prompt
    segments: list[Segment]  # at least one, in the order of playing
    end: End
    text: str = ""  # the response, decoded
    turns: int = 1
    score: Score | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    replays: int = 0  # times that it was played again because the infrastructure had failed
    failure: str | None = None  # what failed at last, in words
    agent: str = ""  # who played it, where several agents share an episode
    seed: int | None = None  # of its environment; siblings begin with equal observations
    shown: tuple[Shown, ...] = ()  # its turns for people, if somebody asked for them

    @property
    def response_length(self) -> int:
        """Sampled tokens of all segments; environment tokens do not count."""
        return sum(sum(segment.loss_mask) for segment in self.segments)

    @property
    def response_ids(self) -> list[int]:
        """All from the first sampled token on; of later segments, which begin with what is known
        already, the sampled tokens."""
        first, *later = self.segments
        after_prompt = first.token_ids[first.context_length :]
        return [*after_prompt, *(i for segment in later for i in segment.sampled_ids)]

    @property
    def versions(self) -> range:
        """From the oldest weights that sampled a token to the newest; empty if nobody knows."""
        found = [span.version for segment in self.segments for span in segment.versions]
        return range(min(found), max(found) + 1) if found else range(0)

    @property
    def failed(self) -> bool:
        """The infrastructure failed, or its reward did and is to be dropped: not trained, in no
        statistic."""
        return self.end.is_failure or (self.score is not None and self.score.dropped)


@dataclass
class Group:
    """The trajectories of one prompt: siblings that are compared with each other."""

    prompt: Prompt
    trajectories: list[Trajectory]  # [G]
    greedy: Trajectory | None = None  # the answer decoded at temperature 0, if one was asked for

    @property
    def answers(self) -> list[Trajectory]:
        """All that are scored: the trajectories, and the greedy answer if there is one."""
        return [*self.trajectories, *([self.greedy] if self.greedy else [])]

    @property
    def of_agents(self) -> list[Group]:
        """The trajectories of each agent, which are compared with each other alone: several where
        several agents share an episode. One that failed is nobody's."""
        by_agent: dict[str, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            by_agent.setdefault(trajectory.agent, []).append(trajectory)
        groups = [replace(self, trajectories=played) for played in by_agent.values()]
        sound = [g for g in groups if not all(t.end.is_failure for t in g.trajectories)]
        return sound or groups

    @property
    def rewards(self) -> list[float]:
        """Of the trajectories that have one."""
        return [t.score.reward for t in self.trajectories if t.score is not None and not t.failed]

    @property
    def greedy_reward(self) -> float | None:
        """None without a greedy answer, or without a reward for it."""
        if self.greedy and self.greedy.score and not self.greedy.failed:
            return self.greedy.score.reward
        return None

    @property
    def mean_pass(self) -> float | None:
        """Mean of ``passed`` over the group, failed trajectories left out; None if any has no
        verdict."""
        passed = [t.score.passed if t.score else None for t in self.trajectories if not t.failed]
        known = [verdict for verdict in passed if verdict is not None]
        return sum(known) / len(known) if known and len(known) == len(passed) else None

    @property
    def is_flat(self) -> bool:
        """All rewards equal: a group-relative estimator learns nothing from it."""
        return len(set(self.rewards)) <= 1


@dataclass(frozen=True)
class WeightManifest:
    """What a weight sync carries: Hugging Face checkpoint names, in the order they are sent."""

    version: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # "float32", "bfloat16", ...
    shapes: tuple[tuple[int, ...], ...]
