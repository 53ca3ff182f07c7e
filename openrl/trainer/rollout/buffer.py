"""Decides when rollouts happen: which prompts may start now, and which answers a step trains on.

    pending = await buffer.admit()  waits until another prompt may start
    buffer.put(pending, group)      stores its scored answers; if the filter rejects them, the next
                                    prompt may start instead
    taken = await buffer.take()     returns the groups of the next training step
    buffer.set_policy_version(version)
                                    the engines have new weights: prompts that waited may start

On-policy training, dynamic filtering, over-sampling, rollouts that run ahead of training, and
answers that outlive a step are all settings of this one class. A version counts the syncs of
weights. The bound on staleness is hard. With ``wait`` a prompt starts only if even its first token
will be trained in time, and a step waits for answers that would be too old in the next one. With
``drop`` and ``mask`` more prompts start; answers that got too old are played again or not trained.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from openrl.data.order import PromptOrder
from openrl.errors import UserError
from openrl.trace.record import group_from_json, group_to_json
from openrl.trainer.rollout.filtering import DynamicFilter
from openrl.types import Prompt, PromptGroup

Found = TypeVar("Found")
StalenessPolicy = Literal["wait", "drop", "mask"]


@dataclass(frozen=True)
class BufferLimits:
    """The limits on prompts in flight. ``BufferLimits(128)``: on-policy, 128 groups per step."""

    wanted: int  # groups of a training step
    running: int = 0  # prompts that may run at a time, over-sampling beyond ``wanted``; 0: any
    steps_ahead: int = 0  # how many steps rollouts may be ahead of training
    max_staleness: int = 0  # weight syncs between sampling a token and its optimizer step
    policy: StalenessPolicy = "wait"
    carries_over: bool = False  # unfinished prompts continue when a step has its groups
    in_waves: bool = False  # replacement prompts start only once all earlier prompts are complete

    @property
    def surplus(self) -> int:
        """Number of prompts that a step starts beyond the groups wanted."""
        return max(self.running - self.wanted, 0)

    @property
    def capacity(self) -> int:
        """Number of prompts that may be running or complete at a time."""
        return self.wanted * (1 + self.steps_ahead) + self.surplus


@dataclass(eq=False)
class PendingPrompt:
    """A prompt on its way to a training step."""

    index: int  # order of admission over the whole run
    prompt: Prompt
    draw: tuple[int, int] | None = None  # (training step, number in it) at its start; gives a seed
    version: int = -1  # the engines' weights at its start; -1: not started, or starts again
    running: bool = False
    group: PromptGroup | None = None  # the answers, once complete
    kept: bool = True  # False: rejected by the filter, with no prompt left to try instead
    drops: int = 0  # how often it got too old


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of one training step."""

    groups: list[PromptGroup]  # to train on, in the order of admission
    generated: list[PromptGroup]  # these, and those rejected since the last step
    version: int  # of the weights that are trained on them
    counts: dict[str, float] = field(default_factory=dict)  # the buffer's metrics by name
    # abandoned: nobody needs their answers
    aborted: list[PendingPrompt] = field(default_factory=list)
    replayed: list[PromptGroup] = field(default_factory=list)  # of earlier steps, see ReplayBuffer

    @property
    def trained(self) -> list[int]:
        """The places of ``groups`` in ``generated``."""
        place = {id(group): n for n, group in enumerate(self.generated)}
        return [place[id(group)] for group in self.groups]


class RolloutBuffer:
    """The queue of prompts and answers between the engines and the learner."""

    def __init__(
        self,
        prompts: PromptOrder,
        limits: BufferLimits,
        group_filter: DynamicFilter | None = None,
    ) -> None:
        self.prompts, self.limits, self.filter = prompts, limits, group_filter
        self.version = 0  # of the weights that the engines hold
        self.steps = 0  # training steps that have taken their groups
        self._unsent = False  # a step has taken its groups but may still send its weights
        self._asked = False  # a step waits for its groups
        self._arrange([])
        self._filtered: list[tuple[int, PromptGroup]] = []  # (index, group) since the last step
        self._admitted, self._draws, self._tried_again = 0, 0, 0
        self._wave_open = True
        self._dropped = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._error: BaseException | None = None
        self._idle_since: float | None = None  # event-loop time since which no prompt runs
        self._idle_seconds = 0.0

    @property
    def complete(self) -> int:
        """Number of complete groups that wait to be trained on."""
        return len(self._complete)

    @property
    def _running(self) -> int:
        return len(self._pending) - len(self._complete) - len(self._waiting)

    def _arrange(self, prompts: Iterable[PendingPrompt]) -> None:
        """Set the prompts that are admitted but not yet taken, in the order of admission, and keep
        apart those that are complete and those that have to start again."""
        self._pending = list(prompts)
        self._complete = [pending for pending in self._pending if pending.group is not None]
        self._waiting = deque(s for s in self._pending if not s.running and s.group is None)

    # -- playing -----------------------------------------------------------------------------------

    async def admit(self) -> PendingPrompt:
        """Return the next prompt to play, once the limits allow it."""
        pending = await self._until(self._admissible)
        if pending.draw is None:
            pending.draw = (self.steps + 1, self._draws)
            self._draws += 1
        pending.version = self.version
        pending.running = True
        if self._idle_since is not None:
            self._idle_seconds += asyncio.get_running_loop().time() - self._idle_since
            self._idle_since = None
        return pending

    def put(self, pending: PendingPrompt, group: PromptGroup) -> None:
        """Store the scored answers to a prompt, or discard it if the filter rejects them and
        another prompt may be tried."""
        pending.running = False
        if self.filter is not None and not self.filter.accepts(group):
            if self._tried_again < self.filter.spare:
                self._tried_again += 1
                self._filtered.append((pending.index, group))
                del self._pending[_place(self._pending, pending.index)]
                self._changed()
                return
            pending.kept = False
        pending.group = group
        self._complete.insert(_place(self._complete, pending.index), pending)
        self._changed()

    def fail(self, error: BaseException) -> None:
        """Raise ``error``, if it is the first, in all who wait for the buffer, now or later."""
        self._error = self._error or error
        self._changed()

    def _admissible(self) -> PendingPrompt | None:
        """Return the prompt that may start now: one that has to start again, otherwise the next.
        None if the limits allow neither."""
        limits = self.limits
        waiting = self._waiting[0] if self._waiting else None
        position = _place(self._pending, waiting.index) if waiting else len(self._pending)
        if limits.in_waves:
            self._wave_open = (self._wave_open or not self._running) and position < limits.capacity
        allowed = (
            position < limits.capacity
            and (self._asked or limits.steps_ahead > 0)
            and (not limits.running or self._running < limits.running)
            and (not limits.in_waves or self._wave_open)
            and self._in_time(position, self.version)
        )
        if not allowed:
            return None
        if waiting is None:
            self._pending.append(PendingPrompt(self._admitted, self.prompts.take(1)[0]))
            self._admitted += 1
            return self._pending[-1]
        return self._waiting.popleft()

    def _in_time(self, position: int, version: int) -> bool:
        """Return whether what ``version`` samples at this place of the queue is trained in time."""
        if self.limits.policy != "wait":
            return True
        per_step = self.limits.wanted + (0 if self.limits.carries_over else self.limits.surplus)
        trained_by = self.version + self._unsent + position // per_step
        return trained_by - version <= self.limits.max_staleness

    # -- training ----------------------------------------------------------------------------------

    async def take(self) -> RolloutBatch:
        """Return the groups of the next training step: the first ``wanted`` in the order of
        admission, or with a ``surplus`` those that complete first. A group that the filter rejected
        without a prompt left to try instead counts as one of them, but is not trained on."""
        asked_at = asyncio.get_running_loop().time()
        self._asked, self._unsent = True, False
        self._changed()
        chosen = await self._until(self._selected)
        self._asked, self._unsent = False, True
        self.steps, self._draws, self._tried_again = self.steps + 1, 0, 0
        left = self._without(chosen)
        aborted: list[PendingPrompt] = []
        if not self.limits.steps_ahead and not self.limits.carries_over:
            aborted, left = left, []
        self._arrange(left)
        came = [*self._filtered, *((s.index, s.group) for s in chosen if s.group)]
        generated = [group for _, group in sorted(came, key=lambda item: item[0])]
        self.prompts.learn(generated)
        taken = RolloutBatch(
            groups=[pending.group for pending in chosen if pending.group and pending.kept],
            generated=generated,
            version=self.version,
            counts=self._counts(asked_at)
            | self.prompts.counts()
            | {
                "rollout/surplus_groups": float(len(aborted)),
                "rollout/data_passes": (max(s.index for s in chosen) + 1) / self.prompts.size,
            },
            aborted=aborted,
        )
        self._filtered = []
        self._changed()
        return taken

    def _selected(self) -> list[PendingPrompt] | None:
        """Return the prompts of the next step, or None if it has to wait."""
        limits = self.limits
        if self.complete < limits.wanted:
            return None
        candidates = self._pending[: limits.wanted + limits.surplus]
        complete = self._complete[: _place(self._complete, candidates[-1].index + 1)]
        if len(complete) < limits.wanted:
            return None
        # a prompt that was dropped once goes first, or others might overtake it forever
        dropped = [pending for pending in candidates if pending.drops]
        if any(pending.group is None for pending in dropped[: limits.wanted]):
            return None
        complete.sort(key=lambda pending: not pending.drops)
        chosen = sorted(complete[: limits.wanted], key=lambda pending: pending.index)
        if not limits.carries_over:
            return chosen
        behind = limits.wanted  # the prompts left behind are trained one step later
        in_time = all(
            self._in_time(behind + place, pending.version)
            for place, pending in enumerate(self._without(chosen))
            if pending.version >= 0
        )
        return chosen if in_time else None

    def _without(self, chosen: list[PendingPrompt]) -> list[PendingPrompt]:
        leaving = set(chosen)
        return [pending for pending in self._pending if pending not in leaving]

    def set_policy_version(self, version: int) -> list[PendingPrompt]:
        """Record that the last step is over and that the engines hold weights ``version``. Returns
        the prompts that are now too old: new ones replace them, and nobody needs their answers."""
        # a step that has not sent its weights may still send them, before an evaluation
        self._unsent = self._unsent and version == self.version
        self.version = version
        again: dict[PendingPrompt, PendingPrompt] = {}
        if self.limits.policy == "drop":
            oldest = version - self.limits.max_staleness
            too_old = [pending for pending in self._pending if 0 <= pending.version < oldest]
            again = {s: PendingPrompt(s.index, s.prompt, drops=s.drops + 1) for s in too_old}
        self._arrange(again.get(pending, pending) for pending in self._pending)
        self._dropped += len(again)
        self._changed()
        return list(again)

    def _counts(self, asked_at: float) -> dict[str, float]:
        now = asyncio.get_running_loop().time()
        idle, self._idle_seconds = self._idle_seconds, 0.0
        if self._idle_since is not None:
            idle, self._idle_since = idle + now - self._idle_since, now
        dropped, self._dropped = self._dropped, 0
        return {
            "rollout/buffered_groups": float(self.complete),
            "rollout/running_groups": float(self._running),
            "rollout/dropped_groups": float(dropped),
            "rollout/trainer_wait_seconds": now - asked_at,
            "rollout/engine_wait_seconds": idle,
        }

    # -- waiting -----------------------------------------------------------------------------------

    async def _until(self, find: Callable[[], Found | None]) -> Found:
        """Return what ``find`` finds, once it is not None. Raises the error given to ``fail``."""
        while True:
            if self._error is not None:
                raise self._error
            if (found := find()) is not None:
                return found
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _changed(self) -> None:
        if self._idle_since is None and not self._running:
            self._idle_since = asyncio.get_running_loop().time()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- leaving and returning ---------------------------------------------------------------------

    def taken_before(self) -> None:
        """Record that the groups of a step, taken before a resume, are trained on only now."""
        self._unsent = True

    @property
    def unfinished(self) -> int:
        """Number of prompts that have started and are not complete."""
        return sum(pending.draw is not None and pending.group is None for pending in self._pending)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to train on the same prompts in the same order.
        Unfinished prompts then start over with the same seeds."""
        return {
            "prompts": self.prompts.state(),
            "steps": self.steps,
            "admitted": self._admitted,
            "draws": self._draws,
            "tried_again": self._tried_again,
            "dropped": self._dropped,
            "filtered": [(n, group_to_json(group)) for n, group in self._filtered],
            "slots": [_pending_to_json(pending) for pending in self._pending],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``. Raises UserError for that of a run that replayed rollouts."""
        if "prompts" not in state:
            message = "this checkpoint's run replayed rollouts, so it has no state of prompts"
            raise UserError(
                message, "--rollout_replay_dir, or start from its model with --pretrain"
            )
        self.prompts.load_state(state["prompts"])
        known = {prompt.id: prompt for prompt in self.prompts.items}
        self.steps, self._admitted = state["steps"], state["admitted"]
        self._draws, self._tried_again = state["draws"], state["tried_again"]
        self._dropped = state["dropped"]
        # older checkpoints have other names: turned_down, and ordinal in a prompt
        filtered = state["filtered"] if "filtered" in state else state["turned_down"]
        self._filtered = [(n, group_from_json(g, known)) for n, g in filtered]
        self._arrange(_pending_from_json(pending, known) for pending in state["slots"])


def _place(prompts: list[PendingPrompt], index: int) -> int:
    """Return how many of the prompts, in the order of admission, come before ``index``."""
    return bisect_left(prompts, index, key=lambda pending: pending.index)


def _pending_to_json(pending: PendingPrompt) -> dict[str, Any]:
    return {
        "index": pending.index,
        "prompt": pending.prompt.id,
        "draw": pending.draw,
        "version": pending.version if pending.group else -1,
        "group": group_to_json(pending.group) if pending.group else None,
        "kept": pending.kept,
        "drops": pending.drops,
    }


def _pending_from_json(saved: dict[str, Any], known: dict[str, Prompt]) -> PendingPrompt:
    return PendingPrompt(
        index=saved["index"] if "index" in saved else saved["ordinal"],
        prompt=known[saved["prompt"]],
        draw=tuple(saved["draw"]) if saved["draw"] else None,
        # earlier checkpoints of unfinished episodes have the version of their first turns
        version=saved["version"] if saved["group"] else -1,
        group=group_from_json(saved["group"], known) if saved["group"] else None,
        kept=saved["kept"],
        drops=saved["drops"],
    )
