"""Evaluation: pass rates on a fixed set of prompts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from openrl.cluster.rollout_worker import RolloutRequest
from openrl.config.data import PromptEvalFlags
from openrl.rewards.at_k import figures_at, powers_of_two, vote
from openrl.tracking.metrics import Last, Mean, Metric, Sum
from openrl.tracking.renders import save_episodes
from openrl.trainer.playing.metrics import agent_metrics
from openrl.trainer.playing.reward_failures import failed_rewards
from openrl.trainer.playing.rollouts import Rollouts, Tell
from openrl.types import Group, Prompt, Sampling

PASS_RATE = "eval/pass_rate"  # over all sources; the metric that reports and plots show
LENGTH = "eval/response_length"


class Evaluation:
    """Plays the same prompts each time, ``--eval_n_samples_per_prompt`` times each. ``renders`` is
    the directory for rendered episodes, if any."""

    def __init__(
        self,
        flags: PromptEvalFlags,
        prompts: list[Prompt],
        sampling: Sampling,
        seed: int,
        renders: str | None = None,
    ) -> None:
        self.renders = Path(renders) if renders else None
        self.prompts = [replace(prompt, shown=self.renders is not None) for prompt in prompts]
        self.request = RolloutRequest(flags.eval_n_samples_per_prompt, sampling, seed=(seed, -1, 0))
        self.answered: list[Group] = []  # the groups of the last evaluation
        self.at_a_time = flags.eval_batch_size if flags.eval_batch_size > 0 else len(prompts)

    async def run(self, rollouts: Rollouts, tell: Tell, step: int = 0) -> dict[str, Metric]:
        """Evaluate after training step ``step``. Call it within ``Rollouts.generating``. Raises
        RuntimeError if the engines' weights changed meanwhile."""
        groups: list[Group] = []
        while (first := len(groups)) < len(self.prompts):
            some = self.prompts[first : first + self.at_a_time]

            def of_all(done: int, total: int, first: int = first) -> None:
                tell(first + done, len(self.prompts))

            groups += await rollouts.play_all(some, self.request, of_all, first)
        self.answered = groups
        versions = {v for group in groups for t in group.trajectories for v in t.versions}
        if len(versions) > 1:
            raise RuntimeError(f"an evaluation mixes the weights of versions {sorted(versions)}")
        if self.renders is not None:
            save_episodes(self.renders / f"step_{step}", groups)
        return eval_metrics(groups) | ({"eval/policy_version": Last(*versions)} if versions else {})


def metric_names(prompts: list[Prompt], samples: int) -> list[str]:
    """Return the names of the metrics that an evaluation of these prompts may report."""
    sources = dict.fromkeys(prompt.source for prompt in prompts)
    several = _of_prompt([None] * samples, [0.0] * samples) if samples > 1 else {}
    figures = [f"mean@{samples}", *several]
    return [PASS_RATE, LENGTH, *(_of_source(s, figure) for figure in figures for s in sources)]


def _of_source(source: str, figure: str) -> str:
    return f"val-core/{source}/acc/{figure}"


def _of_prompt(
    votes: list[str | None], verdicts: list[float], samples: int | None = None
) -> dict[str, float]:
    """Return the metrics of a prompt with several answers. ``samples`` answers were requested; some
    of them may have failed."""
    samples = samples or len(verdicts)
    at_k = figures_at(powers_of_two(samples), votes, verdicts, threshold=1.0)
    majorities = {name for name in at_k if name.startswith("maj@")} - {f"maj@{samples}"}
    best = {f"best@{samples}": max(verdicts)}
    return best | {name: value for name, value in at_k.items() if name not in majorities}


def eval_metrics(groups: list[Group]) -> dict[str, Metric]:
    """Return the mean verdict and length over all answers and, for each source under
    val-core/<source>/acc/, ``mean@N``. For N > 1 there are also means over prompts: ``best@N`` is
    the verdict of the best answer, ``pass@k`` whether k answers include a right one, and ``maj@N``
    the verdict of the most frequent answer, if answers can be compared.

    If several agents share an episode, each counts as answering a prompt of its own. A
    trajectory's verdict is ``Score.passed``, or its reward if it has no verdict. Failed
    trajectories are counted but left out."""
    of_agents = [of_one for group in groups for of_one in group.of_agents]
    samples = max((len(g.trajectories) for g in of_agents), default=0)
    figures: dict[str, list[float]] = defaultdict(list)
    everything: list[float] = []
    compared = False
    for group in of_agents:
        scored = [(t.score, t.text) for t in group.trajectories if t.score and not t.failed]
        verdicts = [score.reward if score.passed is None else score.passed for score, _ in scored]
        votes = [vote(text) for _, text in scored]
        everything += verdicts
        compared |= any(answer is not None for answer in votes)
        source = group.prompt.source
        figures[_of_source(source, f"mean@{samples}")] += verdicts
        if samples > 1 and verdicts:
            for name, value in _of_prompt(votes, verdicts, samples).items():
                figures[_of_source(source, name)].append(value)
    lengths = [t.response_length for group in groups for t in group.trajectories]
    metrics: dict[str, Metric] = {
        name: Mean(sum(values), len(values))
        for name, values in figures.items()
        if compared or not name.endswith(f"/maj@{samples}")
    }
    metrics[PASS_RATE] = Mean(sum(everything), len(everything))
    metrics[LENGTH] = Mean(sum(lengths), len(lengths))
    metrics["eval/reward_failures"] = Sum(len(failed_rewards(groups)))
    played = agent_metrics([t for group in groups for t in group.trajectories])
    return metrics | {f"eval/{name.removeprefix('rollout/')}": m for name, m in played.items()}
