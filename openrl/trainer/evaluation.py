"""Pass rates on a fixed set of prompts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from openrl.cluster.rollout_worker import RolloutRequest
from openrl.config.data import PromptEvalFlags
from openrl.tracking.metrics import Last, Mean, Metric, Sum
from openrl.tracking.renders import save_episodes
from openrl.trainer.reward_failures import failed_rewards
from openrl.trainer.rollout_metrics import agent_metrics
from openrl.trainer.rollouts import Rollouts, Tell
from openrl.types import Group, Prompt, Sampling

PASS_RATE = "eval/pass_rate"  # over all sources; the figure that reports and pictures show
LENGTH = "eval/response_length"


class Evaluation:
    """Answers the same prompts each time, ``--eval_n_samples_per_prompt`` times each; ``renders``
    is a directory for episodes."""

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
        self.answered: list[Group] = []  # by the last run
        self.at_a_time = flags.eval_batch_size if flags.eval_batch_size > 0 else len(prompts)

    async def run(self, rollouts: Rollouts, tell: Tell, step: int = 0) -> dict[str, Metric]:
        """Within ``Rollouts.generating``, after training step ``step``. RuntimeError if the engines
        got other weights meanwhile."""
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
    """What an evaluation of these prompts is going to measure of their answers."""
    sources = dict.fromkeys(prompt.source for prompt in prompts)
    kinds = ["mean", "best"] if samples > 1 else ["mean"]
    return [
        PASS_RATE,
        LENGTH,
        *(_of_source(source, kind, samples) for kind in kinds for source in sources),
    ]


def _of_source(source: str, kind: str, samples: int) -> str:
    return f"val-core/{source}/acc/{kind}@{samples}"


def eval_metrics(groups: list[Group]) -> dict[str, Metric]:
    """Mean verdict and length over all answers, and per source under the name
    ``val-core/<source>/acc/mean@N``; the mean of each prompt's best answer as ``best@N``, for N >
    1.

    A trajectory's verdict is ``Score.passed``, or its reward where the reward gives no verdict.
    Failed ones are counted and left out."""
    verdicts: dict[str, list[float]] = defaultdict(list)
    best: dict[str, list[float]] = defaultdict(list)
    lengths = []
    for group in groups:
        scores = [t.score for t in group.trajectories if t.score and not t.failed]
        of_group = [s.reward if s.passed is None else s.passed for s in scores]
        verdicts[group.prompt.source] += of_group
        best[group.prompt.source] += [max(of_group)] if of_group else []
        lengths += [t.response_length for t in group.trajectories]
    samples = max((len(g.trajectories) for g in groups), default=0)
    metrics: dict[str, Metric] = {
        _of_source(source, "mean", samples): Mean(sum(v), len(v)) for source, v in verdicts.items()
    }
    if samples > 1:
        metrics |= {
            _of_source(source, "best", samples): Mean(sum(v), len(v)) for source, v in best.items()
        }
    everything = [v for source in verdicts.values() for v in source]
    metrics[PASS_RATE] = Mean(sum(everything), len(everything))
    metrics[LENGTH] = Mean(sum(lengths), len(lengths))
    metrics["eval/reward_failures"] = Sum(len(failed_rewards(groups)))
    played = agent_metrics([t for group in groups for t in group.trajectories])
    return metrics | {f"eval/{name.removeprefix('rollout/')}": m for name, m in played.items()}
