"""What the metrics of a run say, in sentences: is it learning, where does the time go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

Curves = Mapping[str, Sequence[Sequence[float]]]

STAGES = "time/"
WHOLE = "time/step"
PROGRESS = (  # metric, its name in a sentence, whether lower is better
    ("rollout/reward", "The mean training reward", False),
    ("rollout/pass_rate", "The training pass rate", False),
    ("eval/pass_rate", "The pass rate in evaluations", False),
    ("eval/reward", "The mean reward in evaluations", False),
    ("loss", "The training loss", True),
    ("eval/loss", "The loss in evaluations", True),
)


def learning(curves: Curves) -> list[str]:
    """Return a sentence for each measure of progress: its first and its last tenth, or what an
    evaluation said first and last."""
    return [
        _change(words, curves[name][1], lower)
        for name, words, lower in PROGRESS
        if name in curves and len(curves[name][1]) > 1
    ]


def _change(words: str, values: Sequence[float], lower: bool) -> str:
    tenth = max(1, len(values) // 10)
    first, last = fmean(values[:tenth]), fmean(values[-tenth:])
    spread = max(values) - min(values)
    if abs(last - first) <= 0.05 * spread:
        return f"{words} has not changed: {first:.3g} at the start, {last:.3g} now."
    verb = "rose" if last > first else "fell"
    judged = "" if (last > first) != lower else ", which is the wrong direction"
    return f"{words} {verb} from {first:.3g} to {last:.3g}{judged}."


def time_by_stage(curves: Curves) -> list[tuple[str, float]]:
    """Return each stage's share of the time of all steps, the largest first; what no stage took is
    "other"."""
    totals = {
        name.removeprefix(STAGES): sum(values)
        for name, (_, values) in curves.items()
        if name.startswith(STAGES) and name != WHOLE
    }
    whole = sum(curves[WHOLE][1]) if WHOLE in curves else sum(totals.values())
    if whole <= 0:
        return []
    rest = whole - sum(totals.values())
    if rest > 0.005 * whole:
        totals["other"] = rest
    shares = ((name, seconds / whole) for name, seconds in totals.items())
    return sorted(shares, key=lambda item: -item[1])
