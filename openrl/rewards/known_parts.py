"""Which parts of the reward the sources of a run can give, as far as it is known before a start."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from openrl.config.reward_plan import RewardPlan, RewardSource
from openrl.errors import UserError
from openrl.extension_points import verifiers
from openrl.rewards.verifiers.base import describe


def check_parts(plan: RewardPlan, estimator: str, wanted: Iterable[str]) -> None:
    """Raise UserError unless the sources can give an estimator the parts that are ``wanted``, or
    any. Files, servers and verifiers of plugins may give all."""
    known = known_parts(plan)
    if not known:
        raise UserError(
            f"--advantage_estimator {estimator} reads the parts of the reward, and no source of"
            " this run gives any",
            "several --reward_funcs, a reward file that returns extra_logs, or another estimator",
        )
    lacking = [name for name in wanted if not any(fnmatchcase(name, part) for part in known)]
    if lacking:
        raise UserError(
            f"--gdpo_parts: no reward source of this run gives {', '.join(lacking)}",
            f"--gdpo_parts with some of: {', '.join(known)}",
        )


def known_parts(plan: RewardPlan) -> list[str]:
    """Return the names that parts may have, as ``RewardCombiner`` gives them, with ``*`` for any
    text."""
    if len(plan.sources) == 1:
        return _of_source(plan.sources[0])
    names = [source.name for source in plan.sources]
    inner = [f"{source.name}/{part}" for source in plan.sources for part in _of_source(source)]
    return [*names, *inner]


def _of_source(source: RewardSource) -> list[str]:
    if source.kind == "model":
        return []
    if source.kind != "verifier":
        return ["*"]
    verify = verifiers[source.address].component
    built_in = verify.__module__.startswith("openrl.")
    return list(describe(verify).parts) if built_in else ["*"]
