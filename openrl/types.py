"""The nouns: every record that travels between the parts of openrl, with its shapes.

L is the number of tokens in a segment, G the number of trajectories in a group.
``openrl.experience`` holds the tensors that a training step builds from these records.

All fields share one alignment: a per-token field describes *the token at its own index*. So
``logprobs[b, t] = log p(token_ids[b, t] | token_ids[b, :t])``; index 0 has no prediction and is
never trained. The only shift by one lives in ``openrl.models.logprobs``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self

from openrl.files import writable
from openrl.token_origins import KeptSets, Routes, VersionSpan

Message = dict[str, Any]
"""One chat message in the form that chat templates take: "role", "content" and any further keys
that the template knows."""


def message_text(message: Message) -> str:
    """Return the text of a message, without its images."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


class FinishReason(str, Enum):
    """Why a completion or a trajectory ended."""

    STOP = "stop"  # end-of-text token, a stop text, or the environment ended the episode
    LENGTH = "length"  # ran out of tokens
    MAX_TURNS = "max_turns"  # ran out of turns
    TIMEOUT = "timeout"  # ran out of time
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"
    INTERRUPTED = "interrupted"  # abandoned before it was over

    @property
    def is_failure(self) -> bool:
        """True if the infrastructure failed rather than the policy. No reward would be right, so
        the trajectory gets none."""
        return self in (
            FinishReason.ENVIRONMENT_ERROR,
            FinishReason.ENGINE_ERROR,
            FinishReason.INTERRUPTED,
        )

    @property
    def is_truncated(self) -> bool:
        """True if a limit cut the policy off before it was done."""
        return self in (FinishReason.LENGTH, FinishReason.MAX_TURNS, FinishReason.TIMEOUT)


@dataclass(frozen=True)
class Sampling:
    """How an engine samples one completion. With ``seed`` None the engine chooses the seed."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    # limit on prompt and completion tokens together; None: the engine's own limit
    max_len: int | None = None
    seed: int | None = None
    # most ids of a kept set that a completion brings with each token; 0: it brings no kept sets
    kept_ids: int = 0
    # how many of the likeliest tokens it brings with each token, with their log-probs
    likeliest: int = 0
    routes: bool = False  # a completion brings the experts that a mixture's routers chose

    @property
    def lists(self) -> bool:
        """Whether a completion brings ``KeptSets``."""
        return bool(self.kept_ids or self.likeliest)


@dataclass(frozen=True)
class Image:
    """A picture as both engine and trainer receive it: RGB, resized once. Equal hashes mean equal
    pictures."""

    data: bytes = field(repr=False, compare=False)  # encoded, like an image file
    sha256: str


@dataclass(frozen=True)
class PlacedImage:
    """An image that occupies the tokens [start, end) of a row. An engine receives ``placeholder``
    in their place and expands it itself."""

    image: Image
    start: int
    end: int
    placeholder: tuple[int, ...]

    def moved(self, by: int) -> PlacedImage:
        return replace(self, start=self.start + by, end=self.end + by)


@dataclass(frozen=True)
class Prompt:
    """One tokenised row of the data. Example: ``Prompt("train:17", [5, 9], "3 4 -> 7:",
    label="7")``."""

    id: str  # unique in a run, stable across epochs and resumes
    token_ids: list[int]
    text: str
    label: Any = None  # the value of --label_key, passed to rewards unchanged
    messages: tuple[Message, ...] = ()  # the chat that ``text`` was rendered from, if any
    variables: dict[str, Any] = field(default_factory=dict)  # the row's, of the chat template
    source: str = "default"  # data source or tag; metrics are split by it
    difficulty: float | None = None  # in [0, 1], the column --difficulty_key
    images: tuple[PlacedImage, ...] = ()  # in the order of ``token_ids``
    meta: dict[str, Any] = field(default_factory=dict)
    render: bool = False  # keep the turns of its episodes for people to read
    privileged: Prompt | None = None  # the prompt as a teacher reads it, see --teacher_prompt_key

    def __post_init__(self) -> None:
        for name in ("id", "source"):  # of files and environments, which may have any name
            object.__setattr__(self, name, writable(getattr(self, name)))

    @property
    def chat(self) -> list[Message]:
        """The chat; a text is one message of the user."""
        return list(self.messages) or [{"role": "user", "content": self.text}]


@dataclass(frozen=True)
class Completion:
    """An engine's reply to one request."""

    token_ids: list[int]  # [n] sampled tokens, the end-of-text token included
    logprobs: list[float]  # [n] log-probs of these tokens at the sampling temperature
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]  # consecutive spans that cover all n tokens
    kept: KeptSets | None = None  # [n] if the request asked for them
    routes: Routes | None = None  # [prompt + n], if the request asked for them


@dataclass(frozen=True)
class Score:
    """The score that a reward source gives one trajectory."""

    reward: float  # the input of advantage estimation
    passed: float | None = None  # in [0, 1], for filtering and pass rates; None = unknown
    parts: dict[str, float] = field(default_factory=dict)  # named components, logged
    # [L] process rewards; the segments are concatenated
    token_rewards: list[float] | None = None
    attempts: int = 1  # calls made to get the score, retries included
    # why the reward sources gave no reward. ``reward`` is then NaN, which drops the trajectory, or
    # 0 if --reward_failure_policy says so
    failure: str | None = None
    seconds: float | None = field(default=None, compare=False)  # until the sources had answered
    feedback: str = ""  # what a reward or an environment says about the answer
    applies: bool = True  # False: the source rates no answers of this kind

    def __post_init__(self) -> None:
        object.__setattr__(self, "feedback", writable(self.feedback))
        parts = {writable(str(name)): value for name, value in self.parts.items()}
        object.__setattr__(self, "parts", parts)
        if self.failure is not None:
            object.__setattr__(self, "failure", writable(self.failure))

    @classmethod
    def of(cls, right: bool, **parts: float) -> Self:
        """Return 1 for an answer that is right, 0 for any other."""
        return cls(float(right), float(right), parts)

    @classmethod
    def failed(cls, failure: str, attempts: int = 1) -> Self:
        """Return the score of a trajectory that could not be scored."""
        return cls(math.nan, attempts=attempts, failure=failure)

    @property
    def dropped(self) -> bool:
        """True if training and statistics leave the trajectory out."""
        return math.isnan(self.reward)


@dataclass(frozen=True)
class PrivilegedContext:
    """What a teacher reads in place of the first ``length`` tokens of a row."""

    length: int
    token_ids: list[int]  # none: it has no teacher
    images: tuple[PlacedImage, ...] = ()  # in the order of ``token_ids``
    text: str = ""  # while some of it is open, see ``Hints.finish``


@dataclass
class Segment:
    """One token row to train on: a prompt, followed by sampled and observed tokens."""

    token_ids: list[int] = field(default_factory=list)  # [L] prompt first
    loss_mask: list[bool] = field(default_factory=list)  # [L] True where the policy sampled
    # [L] from the engine, 0.0 where loss_mask is False
    rollout_logprobs: list[float] = field(default_factory=list)
    versions: tuple[VersionSpan, ...] = ()  # spans over the sampled tokens of the row
    state: str | None = None  # key of the observation that the row answers; None: the prompt
    images: tuple[PlacedImage, ...] = ()  # in the order of ``token_ids``
    kept: KeptSets | None = None  # [L] if the engine was asked for them
    routes: Routes | None = None  # [L] with --routing_replay
    # None: a row that begins with its prompt begins with ``Prompt.privileged`` for a teacher
    privileged: PrivilegedContext | None = None

    @property
    def context_length(self) -> int:
        """Number of tokens before the first sampled one; L if none was sampled."""
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
        kept: KeptSets | None = None,
        routes: Routes | None = None,
    ) -> Self:
        """Build the row of a prompt and the tokens sampled after it. ``versions`` counts from the
        first sampled token. ``logprobs`` None means that nobody measured them; they are set to
        0."""
        row = cls()
        row.observe(prompt_ids, images)
        row.sample(token_ids, logprobs or [0.0] * len(token_ids), versions, kept, routes)
        return row

    def observe(self, token_ids: list[int], images: tuple[PlacedImage, ...] = ()) -> None:
        """Append tokens that the policy did not sample. ``images`` have their places in the row."""
        self.token_ids += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.rollout_logprobs += [0.0] * len(token_ids)
        self.images = (*self.images, *images)
        if self.kept is not None:
            self.kept.extend(KeptSets.of([[]] * len(token_ids)))
        if self.routes is not None:
            self.routes = self.routes.first(len(self.token_ids))

    def sample(
        self,
        token_ids: list[int],
        logprobs: list[float],
        versions: tuple[VersionSpan, ...],
        kept: KeptSets | None = None,
        routes: Routes | None = None,
    ) -> None:
        """Append tokens that the policy sampled. ``versions`` and ``kept`` count from the first of
        them, ``routes`` from the beginning of the row; what they say of tokens behind the last is
        left out."""
        before = len(self.token_ids)
        if kept is not None and self.kept is None:
            self.kept = KeptSets.of([[]] * before)
        if self.kept is not None:
            sets = KeptSets.of([[]] * len(token_ids)) if kept is None else kept
            self.kept.extend(sets.first(len(token_ids)))
        self.token_ids += token_ids
        self.loss_mask += [True] * len(token_ids)
        self.rollout_logprobs += logprobs
        if routes is not None and self.routes is not None:
            routes = self.routes.followed_by(routes)
        routes = routes or self.routes
        self.routes = routes and routes.first(len(self.token_ids))
        for span in versions:
            start, end = before + span.start, before + min(span.end, len(token_ids))
            last = self.versions[-1] if self.versions else None
            if last is not None and (last.end, last.version) == (start, span.version):
                self.versions = (*self.versions[:-1], replace(last, end=end))
            elif start < end:
                self.versions = (*self.versions, VersionSpan(start, end, span.version))

    def cut(self, length: int) -> None:
        """Remove the tokens from ``length`` on, and the images that end there."""
        for column in (self.token_ids, self.loss_mask, self.rollout_logprobs):
            del column[length:]
        spans = (replace(span, end=min(span.end, length)) for span in self.versions)
        self.versions = tuple(span for span in spans if span.start < span.end)
        self.images = tuple(image for image in self.images if image.end <= length)
        self.kept = None if self.kept is None else self.kept.first(length)
        self.routes = None if self.routes is None else self.routes.first(length)


@dataclass(frozen=True)
class RenderedTurn:
    """One turn for people to read: what the policy saw and what it did. The last turn of
    an episode shows its end and holds no action."""

    messages: tuple[Message, ...]  # new in this turn
    frame: Image | None = None  # what the environment drew
    action: str | None = None
    reward: float = 0.0


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool by a policy."""

    turn: int  # the first is 1
    name: str
    seconds: float
    failed: bool


@dataclass
class Trajectory:
    """One episode played from a prompt. It usually has one segment; an agent that rewrites its
    context instead of only appending to it leaves several. Example: ``Trajectory(prompt,
    [Segment([5, 9, 7], ...)], FinishReason.STOP, "7")``."""

    prompt: Prompt
    segments: list[Segment]  # at least one, in the order they were played
    finish_reason: FinishReason
    text: str = ""  # the response, decoded
    turns: int = 1
    score: Score | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    replays: int = 0  # how often it was replayed after an infrastructure failure
    failure: str | None = None  # why the infrastructure failed; None if it did not
    fault: str = ""  # that in a word: engine, error, timeout, crash, memory, value, length or seed
    agent: str = ""  # who played it, where several agents share an episode
    episode: int = 0  # number of its episode among those of the prompt
    seed: int | None = None  # environment seed; siblings start from equal observations
    rendered: tuple[RenderedTurn, ...] = ()  # its turns for people, if they were requested
    # who sampled it with which seed and in which time, for people
    engine: int | None = field(default=None, compare=False)  # rank of the engine
    sampling_seed: int | None = None  # of its first request; None: the engine chose one
    seconds: float | None = field(default=None, compare=False)
    tool_uses: list[ToolUse] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        self.failure = None if self.failure is None else writable(self.failure)
        self.agent = writable(self.agent)
        self.metrics = {writable(str(name)): value for name, value in self.metrics.items()}

    @property
    def response_length(self) -> int:
        """Number of sampled tokens in all segments; environment tokens do not count."""
        return sum(sum(segment.loss_mask) for segment in self.segments)

    @property
    def response_ids(self) -> list[int]:
        """All tokens of the first segment from the first sampled one on, then only the sampled
        tokens of later segments, whose contexts repeat what came before."""
        first, *later = self.segments
        after_prompt = first.token_ids[first.context_length :]
        return [*after_prompt, *(i for segment in later for i in segment.sampled_ids)]

    @property
    def versions(self) -> range:
        """Versions from the oldest weights that sampled a token to the newest; empty if
        unknown."""
        found = [span.version for segment in self.segments for span in segment.versions]
        return range(min(found), max(found) + 1) if found else range(0)

    @property
    def failed(self) -> bool:
        """True if the infrastructure failed, or if the reward failed and the trajectory is to be
        dropped. Training and statistics leave it out."""
        return self.finish_reason.is_failure or (self.score is not None and self.score.dropped)

    @property
    def any_failure(self) -> str | None:
        """Why the infrastructure or else the reward failed; None if neither did."""
        return self.failure or (self.score.failure if self.score else None)


@dataclass
class PromptGroup:
    """The trajectories of one prompt, called siblings. Estimators compare them with each other."""

    prompt: Prompt
    trajectories: list[Trajectory]  # [G]
    greedy: Trajectory | None = None  # the answer decoded at temperature 0, if requested
    # attempts that failed and are not among the trajectories: they were played again, or more
    # samples were started than were wanted
    failed_attempts: list[Trajectory] = field(default_factory=list)
    traced: bool = False  # the trace keeps it, and what training finds out about it

    @property
    def answers(self) -> list[Trajectory]:
        """Everything to be scored: the trajectories, and the greedy answer if there is one."""
        return [*self.trajectories, *([self.greedy] if self.greedy else [])]

    @property
    def attempts(self) -> list[Trajectory]:
        """Everything that was played: the answers, and what failed and was left out."""
        return [*self.answers, *self.failed_attempts]

    @property
    def of_agents(self) -> list[PromptGroup]:
        """One group per agent, since an agent's trajectories are only compared with each other.
        There are several where several agents share an episode. An agent whose trajectories all
        failed gets no group, unless all agents' did."""
        by_agent: dict[str, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            by_agent.setdefault(trajectory.agent, []).append(trajectory)
        groups = [replace(self, trajectories=played) for played in by_agent.values()]
        sound = [g for g in groups if not all(t.finish_reason.is_failure for t in g.trajectories)]
        return sound or groups

    @property
    def rewards(self) -> list[float]:
        """Rewards of the trajectories that have one and did not fail."""
        return [t.score.reward for t in self.trajectories if t.score is not None and not t.failed]

    @property
    def greedy_reward(self) -> float | None:
        """Reward of the greedy answer; None if there is no such answer or no reward for it."""
        if self.greedy and self.greedy.score and not self.greedy.failed:
            return self.greedy.score.reward
        return None

    @property
    def mean_pass(self) -> float | None:
        """Mean of ``passed`` over the trajectories that did not fail; None if any of them has no
        verdict."""
        passed = [t.score.passed if t.score else None for t in self.trajectories if not t.failed]
        known = [verdict for verdict in passed if verdict is not None]
        return sum(known) / len(known) if known and len(known) == len(passed) else None

    @property
    def is_flat(self) -> bool:
        """True if all rewards are equal, so that a group-relative estimator learns nothing."""
        return len(set(self.rewards)) <= 1
