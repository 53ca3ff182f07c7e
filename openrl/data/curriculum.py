"""A curriculum: which prompt is next depends on the step and on the verdicts so far.

Each data source is read in its own order, pass after pass. The shares of the sources may change
with the steps. The next prompt of a source is played, or passed over until the next pass: it is
played with the posterior probability that its solve rate lies in a band, given a uniform prior and
verdicts that fade with the steps, Beta(1 + solved, 1 + failed). So uncertainty decides by itself: a
prompt that nobody has seen, or that was seen long ago, has a good chance; one that failed eight
times has the chance (1 - L)^9 that its rate is above L. The latest mean would decide differently:
of eight answers to a prompt of rate 0.1 none is right in 43 % of cases.

What is learnt counts from the next step on. All draws depend on the seed, the step and what was
learnt, so a run that is resumed draws the prompts of one that was not interrupted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from openrl.config.curriculum_mix import Mix, read_mix, weights_at
from openrl.config.groups.curriculum import CurriculumFlags
from openrl.data.order import SeededStream, check_kind
from openrl.data.prompts import prompts_fingerprint
from openrl.errors import UserError
from openrl.types import Prompt, PromptGroup


@dataclass
class Record:
    """What is known of a prompt. The counts are those at step ``counted``."""

    solved: float = 0.0
    failed: float = 0.0
    counted: int = 0
    drawn: int = 0  # the step for which it was drawn last


class Curriculum:
    """Draws prompts like a ``SeededStream``, by what it is told of their answers."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        flags: CurriculumFlags,
        mix: Mix | None,
        seed: int,
        *,
        shuffle: bool = True,
    ) -> None:
        self.items, self.size = prompts, len(prompts)
        self.flags, self.mix, self.seed = flags, mix, seed
        self.step = 0  # training steps that have taken their groups
        self.records: dict[str, Record] = {}  # by id, of prompts that were drawn
        self._draws = self._passed_over = self._forced = 0
        self._drawn: Counter[str] = Counter()  # by data source, since the last step
        by_source: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_source.setdefault(prompt.source if mix else "", []).append(prompt)
        self._orders = {
            source: SeededStream(rows, seed, shuffle=shuffle, data=prompts_fingerprint(rows))
            for source, rows in by_source.items()
        }

    # -- drawing -----------------------------------------------------------------------------------

    def take(self, count: int) -> list[Prompt]:
        """Return the next prompts."""
        return [self._next() for _ in range(count)]

    def peek(self, count: int) -> list[Prompt]:
        """Return prompts that may come next, without taking them."""
        return next(iter(self._orders.values())).peek(count)

    def _next(self) -> Prompt:
        """Return the first prompt in the order of its source that is to be played. After a whole
        pass without any, the next one is played all the same."""
        self._draws += 1
        chance = random.Random(f"{self.seed}/curriculum/{self._draws}")
        order = self._orders[self._source(chance)]
        for _ in range(order.size):
            (prompt,) = order.take(1)
            if self._is_due(prompt) and self._is_in_band(prompt, chance):
                return self._play(prompt)
            self._passed_over += 1
        self._forced += 1
        (prompt,) = order.take(1)
        return self._play(prompt)

    def _play(self, prompt: Prompt) -> Prompt:
        self._record(prompt).drawn = self.step + 1
        self._drawn[prompt.source] += 1
        return prompt

    def _source(self, chance: random.Random) -> str:
        if self.mix is None:
            return ""
        weights = weights_at(self.mix, self.step + 1)
        return chance.choices(list(weights), list(weights.values()))[0]

    def _is_due(self, prompt: Prompt) -> bool:
        record = self.records.get(prompt.id)
        return record is None or self.step + 1 - record.drawn >= self.flags.curriculum_wait

    def _is_in_band(self, prompt: Prompt, chance: random.Random) -> bool:
        """Draw a solve rate from the posterior, and return whether it lies in the band."""
        if self.flags.curriculum_band is None:
            return True
        low, high = self.flags.curriculum_band
        solved, failed = self._counts(prompt.id)
        return low <= chance.betavariate(1 + solved, 1 + failed) <= high

    # -- learning ----------------------------------------------------------------------------------

    def learn(self, groups: Iterable[PromptGroup]) -> None:
        """Take note of the groups that a training step has got. Raises UserError if no answer
        so far has a verdict, although the band asks for solve rates."""
        self.step += 1
        scored = judged = 0
        for group in groups:
            scores = [t.score for t in group.trajectories if t.score and not t.failed]
            verdicts = [score.passed for score in scores if score.passed is not None]
            scored += len(scores)
            judged += len(verdicts)
            if verdicts:
                self._add(group.prompt, sum(verdicts), len(verdicts))
        if self.flags.curriculum_band is None or judged or not scored or self._has_verdicts:
            return
        problem = "--curriculum_band: no answer so far has a verdict"
        raise UserError(problem, "a reward with verdicts (scores in [0, 1]), such as a verifier")

    @property
    def _has_verdicts(self) -> bool:
        return any(record.solved or record.failed for record in self.records.values())

    def _add(self, prompt: Prompt, solved: float, verdicts: int) -> None:
        before, failed = self._counts(prompt.id)
        record = self._record(prompt)
        record.solved, record.failed = before + solved, failed + verdicts - solved
        record.counted = self.step

    def _record(self, prompt: Prompt) -> Record:
        return self.records.setdefault(prompt.id, Record())

    def _counts(self, prompt_id: str) -> tuple[float, float]:
        """Return how many answers were right and wrong, as far as they still count."""
        record = self.records.get(prompt_id)
        if record is None:
            return 0.0, 0.0
        half_life = self.flags.curriculum_half_life
        left = 0.5 ** ((self.step - record.counted) / half_life) if half_life else 1.0
        return record.solved * left, record.failed * left

    # -- metrics -----------------------------------------------------------------------------------

    def counts(self) -> dict[str, float]:
        """Return the metrics of a step by name, and begin to count anew."""
        metrics = {
            "curriculum/passed_over": float(self._passed_over),
            "curriculum/forced": float(self._forced),
        }
        metrics |= {f"curriculum/{name}/drawn": float(n) for name, n in self._drawn.items()}
        self._passed_over = self._forced = 0
        self._drawn = Counter()
        return metrics | self._rates()

    def _rates(self) -> dict[str, float]:
        """Return how many prompts are too hard, too easy, in the band and unknown by the mean of
        their posterior, and the mean of each source over those known."""
        if self.flags.curriculum_band is None:
            return {}
        low, high = self.flags.curriculum_band
        rates: dict[str, list[float]] = {}
        unique = {prompt.id: prompt.source for prompt in self.items}
        for prompt_id, source in unique.items():
            solved, failed = self._counts(prompt_id)
            if solved or failed:
                rates.setdefault(source, []).append((1 + solved) / (2 + solved + failed))
        known = [rate for of_source in rates.values() for rate in of_source]
        shares = {
            "hard": sum(rate < low for rate in known),
            "easy": sum(rate > high for rate in known),
            "in_band": sum(low <= rate <= high for rate in known),
            "unknown": len(unique) - len(known),
        }
        metrics = {f"curriculum/{name}_share": n / len(unique) for name, n in shares.items()}
        return metrics | {f"curriculum/{name}/solve_rate": mean(of) for name, of in rates.items()}

    # -- leaving and returning ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        records = {
            prompt_id: [r.solved, r.failed, r.counted, r.drawn]
            for prompt_id, r in self.records.items()
        }
        return {
            "orders": {source: order.state() for source, order in self._orders.items()},
            "step": self.step,
            "draws": self._draws,
            "passed_over": self._passed_over,
            "forced": self._forced,
            "drawn": dict(self._drawn),
            "records": records,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken. Raises UserError if it is that of a run without a
        curriculum, or with other data sources."""
        check_kind(state, self.state())
        if state["orders"].keys() != self._orders.keys():
            raise UserError(
                "cannot resume the curriculum: the checkpoint's run had other data sources",
                "resume with the same --curriculum flags, or start fresh with --overwrite_ckpt",
            )
        for source, order in self._orders.items():
            order.load_state(state["orders"][source])
        self.step, self._draws = state["step"], state["draws"]
        self._passed_over, self._forced = state["passed_over"], state["forced"]
        self._drawn = Counter(state["drawn"])
        self.records = {prompt_id: Record(*row) for prompt_id, row in state["records"].items()}


def check_mix(flags: CurriculumFlags, prompts: Sequence[Prompt]) -> None:
    """Raise UserError unless --curriculum_mix names the data sources of the prompts."""
    if flags.curriculum_mix is None or not prompts:
        return
    there = {prompt.source for prompt in prompts}
    named = {name for row in read_mix(flags.curriculum_mix).values() for name in row}
    if absent := sorted(named - there):
        message = f"--curriculum_mix: no row is of the data source {absent[0]}"
        raise UserError(message, f"one of {', '.join(sorted(there))}, by --datasource_key")
    if idle := sorted(there - named):
        message = f"--curriculum_mix: rows of the data source {idle[0]} would never be played"
        raise UserError(message, "a weight for it at some step, or data without it")
