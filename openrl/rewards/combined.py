"""Several sources combined into one reward: a weighted sum, and a policy for rows that fail."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrl.config.groups.reward import FailurePolicy
from openrl.config.reward_plan import RewardPlan
from openrl.errors import UserError, short
from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.sources import Source
from openrl.types import PromptGroup, Score, Trajectory
from openrl.vision.placing import unexpanded
from openrl.waiting import all_or_first_error


@dataclass(frozen=True)
class RewardCombiner:
    """Computes the score of a row from those of its sources, of whatever kind these are."""

    plan: RewardPlan
    policy: FailurePolicy

    async def ask(self, sources: Mapping[str, Source], rows: RewardRows) -> list[Score]:
        """Return the weighted sum for each row, of sources that are asked at the same time."""
        columns = await all_or_first_error(source.score(rows) for source in sources.values())
        return [
            self.weighted_sum(datasource, dict(zip(sources, scores, strict=True)))
            for datasource, *scores in zip(rows.sources, *columns, strict=True)
        ]

    def weighted_sum(self, datasource: str, scores: Mapping[str, Score]) -> Score:
        """Return the weighted sum of scores, which are given by the names of their sources, for a
        row of ``datasource``. If a source failed, return its score with the source's name in
        ``failure``.

        With several sources, each one is a part of the score, and its own parts are named
        "source/part". The verdict is the mean of the sources' verdicts, weighted by the absolute
        weights; None if no source gives a verdict. A row that no source rates has failed."""
        weights = self.plan.of(datasource)
        total = Score(0.0)
        verdicts: list[tuple[float, float]] = []
        for name, score in scores.items():
            if score.failure is not None:
                parts = total.parts | self.named(name, score.parts)
                return replace(score, failure=f"{name}: {score.failure}", parts=parts)
            total = self.add(total, name, weights[name], score)
            if score.passed is not None:
                verdicts.append((abs(weights[name]), score.passed))
        if scores and not any(score.applies for score in scores.values()):
            failed = Score.failed("no reward function rates this answer", total.attempts)
            return replace(failed, parts=total.parts)
        share = sum(weight for weight, _ in verdicts)
        passed = sum(weight * verdict for weight, verdict in verdicts) / share if share else None
        if not math.isfinite(total.reward):
            return Score.failed("the sum of the rewards is not finite", total.attempts)
        return replace(total, passed=passed)

    def add(self, score: Score, name: str, weight: float, result: Score) -> Score:
        """Return ``score`` with the result of one more source added; the verdict stays as it is."""
        parts = self.named(name, result.parts)
        if len(self.plan.sources) > 1 and result.applies:  # or its mean would count zeros
            parts = {name: result.reward} | parts
        return replace(
            score,
            reward=score.reward + weight * result.reward,
            parts=score.parts | parts,
            attempts=max(score.attempts, result.attempts),
            feedback="\n".join(filter(None, (score.feedback, result.feedback))),
        )

    def named(self, name: str, parts: Mapping[str, float]) -> dict[str, float]:
        """Return the parts of a source by the names that they have in the sum."""
        several = len(self.plan.sources) > 1
        return {f"{name}/{part}" if several else part: value for part, value in parts.items()}

    def apply_policy(self, trajectory: Trajectory, score: Score) -> Score:
        """Return the score that a row gets: if a source failed on it, the one that the policy
        gives. Raises UserError if the policy is fail."""
        if score.failure is None or self.policy == "drop":
            return score
        if self.policy == "zero":
            return replace(score, reward=0.0, passed=0.0)
        raise UserError(
            "\n".join([f"a reward failed: {score.failure}", *row_lines(trajectory)]),
            "fix the reward, or --reward_failure_policy drop",
        )


def require_no_scores(trajectories: Sequence[Trajectory], plan: RewardPlan) -> None:
    """Raise UserError if agents gave rewards, although the plan has sources of rewards."""
    if plan.flag is not None and any(trajectory.score for trajectory in trajectories):
        problem = "the agent returns rewards, but reward sources are given too"
        raise UserError(problem, f"leave --{plan.flag} out")


def row_lines(trajectory: Trajectory) -> list[str]:
    """Return the lines that show a row in an error message."""
    prompt = trajectory.prompt
    shown = {"prompt": prompt.text, "label": prompt.label, "response": trajectory.text}
    lines = [f"  {name:9} {short(value, 200)}" for name, value in shown.items()]
    return [f"  row       {prompt.id}", *lines]


class CombinedReward:
    """The reward next to an engine."""

    def __init__(
        self,
        combiner: RewardCombiner,
        sources: Mapping[str, Source],
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_special_tokens: bool,
        executor: Executor,
    ) -> None:
        self.combiner, self.sources, self.tokenizer = combiner, sources, tokenizer
        self._skip, self._executor = skip_special_tokens, executor

    async def score(self, group: PromptGroup) -> list[Score]:
        """Return one score per trajectory, in their order. Several groups may be scored at a time.
        Raises UserError, naming the row, if a source fails and the policy is fail."""
        weights = self.combiner.plan.of(group.prompt.source)
        chosen = {name: source for name, source in self.sources.items() if name in weights}
        rows = read_rows(group, self.tokenizer, skip_special_tokens=self._skip)
        scores = await self.combiner.ask(chosen, rows)
        return list(map(self.combiner.apply_policy, group.trajectories, scores))

    async def watch(self, group: PromptGroup) -> list[dict[str, float]]:
        """Return what the watched sources say of each trajectory, as metrics: the verdict or else
        the reward under watch/SOURCE, and under watch/SOURCE/failed whether there is none."""
        watched = {s.name: self.sources[s.name] for s in self.combiner.plan.watched}
        if not watched or not group.trajectories:
            return [{} for _ in group.trajectories]
        rows = read_rows(group, self.tokenizer, skip_special_tokens=self._skip)
        columns = await all_or_first_error(source.score(rows) for source in watched.values())
        named = [dict(zip(watched, scores, strict=True)) for scores in zip(*columns, strict=True)]
        return [_watched_metrics(scores) for scores in named]

    async def close(self) -> None:
        """Release processes and connections. Calls that still run fail."""
        await asyncio.gather(*(source.close() for source in self.sources.values()))
        await asyncio.to_thread(self._executor.shutdown)


def _watched_metrics(scores: Mapping[str, Score]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, score in scores.items():
        metrics[f"watch/{name}/failed"] = float(score.failure is not None)
        if score.failure is None:
            metrics[f"watch/{name}"] = score.reward if score.passed is None else score.passed
    return metrics


def read_rows(
    group: PromptGroup, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool
) -> RewardRows:
    """Return a group as rewards get it. The prompt is decoded like the query, so that the query
    begins with it."""
    prompt, trajectories = group.prompt, group.trajectories
    n = len(trajectories)

    def decode(token_ids: list[int], skip: bool) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=skip)

    def each(value: Any) -> list[Any]:
        return [value] * n

    texts = [decode(t.response_ids, True) for t in trajectories]
    prompt_ids = unexpanded(prompt.token_ids, prompt.images)
    return RewardRows(
        queries=[
            decode([*prompt_ids, *_response_ids(t)], skip_special_tokens) for t in trajectories
        ],
        prompts=each(decode(prompt_ids, skip_special_tokens)),
        labels=each(prompt.label),
        responses=texts if skip_special_tokens else [t.text for t in trajectories],
        texts=texts,
        token_ids=[[i for s in t.segments for i in s.sampled_ids] for t in trajectories],
        sources=each(prompt.source),
        metas=each(prompt.meta),
        images=[_image_files(t) for t in trajectories],
    )


def _response_ids(trajectory: Trajectory) -> list[int]:
    """Return the tokens of the response, with one placeholder for each image."""
    first, *later = trajectory.segments
    start = first.context_length
    images = [image.moved(-start) for image in first.images if image.start >= start]
    ids = unexpanded(first.token_ids[start:], images)
    return [*ids, *(i for segment in later for i in segment.sampled_ids)]


def _image_files(trajectory: Trajectory) -> list[bytes]:
    seen = {p.image.sha256: p.image for s in trajectory.segments for p in s.images}
    return [image.data for image in seen.values()]
