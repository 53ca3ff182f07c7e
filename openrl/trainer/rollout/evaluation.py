"""Evaluation: pass rates and rewards on a fixed set of prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from openrl.config.groups.evaluation import PromptEvalFlags
from openrl.metrics import Last, Mean, Metric, Sum
from openrl.rewards.at_k import metrics_at_k, powers_of_two, vote
from openrl.tracking.progress import Tell
from openrl.trainer.rollout.metrics import agent_metrics, failed_rewards, fault_metrics
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import Prompt, PromptGroup, Sampling
from openrl.workers.rollout_worker import RolloutRequest

PASS_RATE = "eval/pass_rate"  # over all sources that give verdicts
REWARD = "eval/reward"  # over all sources
LENGTH = "eval/response_length"


class Evaluation:
    """Plays the same prompts each time, ``--eval_n_samples_per_prompt`` times each."""

    def __init__(
        self, flags: PromptEvalFlags, prompts: list[Prompt], sampling: Sampling, seed: int
    ) -> None:
        self.prompts = prompts
        self.request = RolloutRequest(flags.eval_n_samples_per_prompt, sampling, seed=(seed, -1, 0))
        self.answered: list[PromptGroup] = []  # the groups of the last evaluation
        self.at_a_time = flags.eval_batch_size if flags.eval_batch_size > 0 else len(prompts)

    async def run(self, rollouts: Rollouts, tell: Tell) -> dict[str, Metric]:
        """Evaluate. Call it within ``Rollouts.generating``. Raises RuntimeError if the engines'
        weights changed meanwhile."""
        groups: list[PromptGroup] = []
        while (first := len(groups)) < len(self.prompts):
            some = self.prompts[first : first + self.at_a_time]

            def of_all(done: int, total: int, first: int = first) -> None:
                tell(first + done, len(self.prompts))

            groups += await rollouts.play_all(some, self.request, of_all, first)
        self.answered = groups
        versions = {v for group in groups for t in group.trajectories for v in t.versions}
        if len(versions) > 1:
            raise RuntimeError(f"an evaluation mixes the weights of versions {sorted(versions)}")
        return eval_metrics(groups) | ({"eval/policy_version": Last(*versions)} if versions else {})


def metric_names(prompts: list[Prompt], samples: int) -> list[str]:
    """Return the names of the metrics that an evaluation of these prompts may report."""
    sources = dict.fromkeys(prompt.source for prompt in prompts)
    figures = [
        f"{kind}/{figure}"
        for kind in ("acc", "reward")
        for figure in _prompt_metrics(kind, [0.0] * samples, [None] * samples, samples)
    ]
    return [PASS_RATE, REWARD, LENGTH, *(f"val-core/{s}/{f}" for f in figures for s in sources)]


def best_metric(values: Mapping[str, float], key: str) -> float | None:
    """Return the value that --best_metric_key ``key`` names; None if it was not measured."""
    return values.get(PASS_RATE, values.get(REWARD)) if key == "auto" else values.get(key)


def _prompt_metrics(
    kind: str, values: list[float], votes: list[str | None], samples: int
) -> dict[str, list[float]]:
    """Return the metrics of a prompt, each with the values to be averaged. ``values`` are the
    verdicts of its answers, or their rewards unless ``kind`` is acc. ``samples`` answers were
    requested; some of them may have failed."""
    figures = {f"mean@{samples}": values}
    if samples > 1 and values:
        figures[f"best@{samples}"] = [max(values)]
    if samples > 1 and values and kind == "acc":
        at_k = metrics_at_k(powers_of_two(samples), votes, values, threshold=1.0)
        majorities = {name for name in at_k if name.startswith("maj@")} - {f"maj@{samples}"}
        figures |= {name: [value] for name, value in at_k.items() if name not in majorities}
    return figures


def eval_metrics(groups: list[PromptGroup]) -> dict[str, Metric]:
    """Return the mean verdict ``eval/pass_rate``, the mean reward ``eval/reward`` and the mean
    length over all answers and, for each source under val-core/<source>/acc/, ``mean@N``. For N > 1
    there are also means over prompts: ``best@N`` is the verdict of the best answer, ``pass@k``
    whether k answers include a right one, and ``maj@N`` the verdict of the most frequent answer, if
    answers can be compared.

    A verdict is ``Score.passed``; answers without one are left out of all that is made of verdicts.
    A source without any verdict has ``mean@N`` and ``best@N`` of its rewards instead, under
    val-core/<source>/reward/. If several agents share an episode, each counts as answering a prompt
    of its own. Failed trajectories are counted but left out."""
    of_agents = [of_one for group in groups for of_one in group.of_agents]
    samples = max((len(g.trajectories) for g in of_agents), default=0)
    scored = [
        (g.prompt.source, [(t.score, t.text) for t in g.trajectories if t.score and not t.failed])
        for g in of_agents
    ]
    rewards = [score.reward for _, answers in scored for score, _ in answers]
    verdicts: list[float] = []
    figures: dict[str, list[float]] = defaultdict(list)
    compared = False
    judged = {source for source, answers in scored for s, _ in answers if s.passed is not None}
    for source, answers in scored:
        if source in judged:
            right = [(s.passed, vote(text)) for s, text in answers if s.passed is not None]
            kind, values, votes = "acc", [v for v, _ in right], [answer for _, answer in right]
            verdicts += values
            compared |= any(answer is not None for answer in votes)
        else:
            kind, values, votes = "reward", [s.reward for s, _ in answers], []
        for name, of_prompt in _prompt_metrics(kind, values, votes, samples).items():
            figures[f"val-core/{source}/{kind}/{name}"] += of_prompt
    answered = [t for group in groups for t in group.trajectories if not t.finish_reason.is_failure]
    lengths = [t.response_length for t in answered]
    metrics: dict[str, Metric] = {
        name: Mean.of(values)
        for name, values in figures.items()
        if compared or not name.endswith(f"/maj@{samples}")
    }
    metrics[PASS_RATE] = Mean.of(verdicts)
    metrics[REWARD] = Mean.of(rewards)
    metrics[LENGTH] = Mean.of(lengths)
    metrics["eval/reward_failures"] = Sum(len(failed_rewards(groups)))
    played = agent_metrics([t for group in groups for t in group.trajectories])
    played |= fault_metrics(groups)
    return metrics | {f"eval/{name.removeprefix('rollout/')}": m for name, m in played.items()}
