"""rescore: what another reward would have given the trajectories of a run's trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from openrl.config.commands import RescoreConfig
from openrl.config.groups.model import ModelFlags
from openrl.config.groups.reward import bearer_token
from openrl.config.reward_plan import RewardPlan, reward_plan
from openrl.data.tokenizer import policy_tokenizer
from openrl.errors import UserError
from openrl.files import write_atomically
from openrl.rewards.build import RewardSetup, build_reward, check_reward_sources
from openrl.rewards.combined import CombinedReward
from openrl.trace.reader import KeptGroup, Trace
from openrl.tracking.console import PlainConsole
from openrl.types import Score
from openrl.waiting import in_order

WIDTH = 64  # groups that are scored at a time
SHOWN = 10  # trajectories whose reward changes most


@dataclass(frozen=True)
class RescoreInputs:
    trace: Trace
    tokenizer: PreTrainedTokenizerBase
    plan: RewardPlan
    steps: list[int]


@dataclass(frozen=True)
class Rescored:
    """The rewards of one trajectory."""

    name: str  # STEP/NUMBER
    group: tuple[int, int]  # step, place in it
    old: float
    new: float


def prepare(config: RescoreConfig) -> RescoreInputs:
    """Open the trace and try the reward. Raises UserError."""
    trace = Trace(config.task.run)
    there = trace.steps()
    if missing := [step for step in config.task.steps if step not in there]:
        raise UserError(
            f"--steps: the trace holds no trajectories of step {missing[0]}",
            f"steps from {there[0]} to {there[-1]}" if there else "another run",
        )
    plan = reward_plan(config.reward)
    if not plan.sources:
        raise UserError("there is nothing to score with", "--remote_rm_url new_reward.py")
    check_reward_sources(config.reward, plan.sources, config.debug.plugin)
    tokenizer = policy_tokenizer(model_of(Path(config.task.run).expanduser()), None)
    return RescoreInputs(trace, tokenizer, plan, list(config.task.steps) or there)


def model_of(run: Path) -> ModelFlags:
    """Return the model whose tokenizer the run used. Raises UserError if nothing says so."""
    for directory in (run, run.parent):
        if (directory / "tokenizer_config.json").is_file():  # beside the trained model
            return ModelFlags(pretrain=str(directory))
        if (path := directory / "config.yaml").is_file():
            flags = yaml.safe_load(path.read_text(encoding="utf-8"))
            return ModelFlags(
                pretrain=flags["pretrain"], tokenizer_path=flags.get("tokenizer_path")
            )
    raise UserError(f"{run}: no config.yaml says which tokenizer the run used", "the --save_path")


async def run(config: RescoreConfig, inputs: RescoreInputs) -> None:
    """Score everything again and print what changes."""
    console = PlainConsole()
    setup = RewardSetup(config.reward, inputs.plan, bearer_token())
    reward = build_reward(setup, inputs.tokenizer, plugins=config.debug.plugin)
    assert reward is not None
    try:
        rows, failures = await score_all(reward, inputs, console)
    finally:
        await reward.close()
    console.print(table(figures(rows)))
    for row in sorted(rows, key=lambda row: -abs(row.new - row.old))[:SHOWN]:
        if row.new != row.old:
            console.print(f"{row.name}: {row.old:.4g} -> {row.new:.4g}")
    if failures:
        console.print(f"{len(failures)} trajectories got no new reward, first: {failures[0]}")
    if config.task.output_path is not None:
        lines = [
            json.dumps({"trajectory": r.name, "reward": r.old, "new_reward": r.new}) for r in rows
        ]
        write_atomically(Path(config.task.output_path), "".join(f"{line}\n" for line in lines))
    most = config.reward.max_reward_failure_rate * (len(rows) + len(failures))
    if len(failures) > most:
        raise UserError("too many trajectories have no reward to trust the table", "fix the reward")


async def score_all(
    reward: CombinedReward, inputs: RescoreInputs, console: Console
) -> tuple[list[Rescored], list[str]]:
    """Return the trajectories that have both rewards, and why others have no new one."""
    rows: list[Rescored] = []
    failures: list[str] = []
    jobs = [scored for step in inputs.steps for scored in scored_groups(inputs.trace, step)]

    async def score(job: KeptGroup) -> list[Score]:
        return await reward.score(job.group)

    with Progress(console=console, disable=not console.is_terminal) as bar:
        task, waiting = bar.add_task("groups", total=len(jobs)), iter(jobs)
        async for scores in in_order(jobs, score, WIDTH):
            job = next(waiting)
            bar.advance(task)
            played = zip(job.numbers, job.group.trajectories, scores, strict=True)
            for number, trajectory, new in played:
                name, old = f"{job.step}/{number}", trajectory.score
                if new.failure is not None:
                    failures.append(f"{name}: {new.failure}")
                elif old is not None:
                    rows.append(Rescored(name, (job.step, job.place), old.reward, new.reward))
    return rows, failures


def scored_groups(trace: Trace, step: int) -> Iterator[KeptGroup]:
    """Yield the groups of a step, without the trajectories that had no reward."""
    for kept in trace.kept(step):
        both = zip(kept.numbers, kept.group.trajectories, strict=True)
        sound = [(n, t) for n, t in both if t.score is not None and not t.failed]
        if sound:
            group = replace(kept.group, trajectories=[t for _, t in sound])
            yield replace(kept, numbers=[n for n, _ in sound], group=group)


# -- what changes ----------------------------------------------------------------------------------


def figures(rows: Sequence[Rescored]) -> dict[str, float]:
    """Compare the rewards. The advantage of a trajectory here is its reward minus the mean of its
    group; one changes sign if the two rewards' differ in sign, or if only one of them is 0."""
    if not rows:
        return {}
    old, new = np.array([r.old for r in rows]), np.array([r.new for r in rows])
    groups = np.unique([r.group for r in rows], axis=0, return_inverse=True)[1].reshape(-1)
    signs = [np.sign(np.round(centred(rewards, groups), 9)) for rewards in (old, new)]
    flat = [len(set(groups)) - len(set(groups[sign != 0])) for sign in signs]
    return {
        "trajectories": len(rows),
        "groups": len(set(groups)),
        "mean reward before": float(old.mean()),
        "mean reward after": float(new.mean()),
        "rewards that change": int((old != new).sum()),
        "rank correlation": rank_correlation(old, new),
        "flat groups before": flat[0],
        "flat groups after": flat[1],
        "advantages that change sign": int((signs[0] != signs[1]).sum()),
    }


def centred(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return rewards (N,) minus the mean of their group; ``groups`` (N,) counts from 0."""
    counts = np.bincount(groups)
    return rewards - (np.bincount(groups, rewards) / counts)[groups]


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Return Spearman's correlation: Pearson's of the ranks, where equal values share the mean of
    their ranks. NaN if all values of a side are equal."""
    sides = [ranks(values) - (len(values) - 1) / 2 for values in (left, right)]
    scale = float(np.sqrt((sides[0] ** 2).sum() * (sides[1] ** 2).sum()))
    return float((sides[0] * sides[1]).sum() / scale) if scale else math.nan


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value from 0; equal values get the mean of theirs."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum() - 1
    return (last - (counts - 1) / 2)[index.reshape(-1)]


def table(found: dict[str, float]) -> Table:
    shown = Table(title="Another reward", title_justify="left", show_header=False)
    for name, value in found.items():
        shown.add_row(name, f"{value:.4g}")
    return shown
