"""Directories as runs leave them, with known figures: a reward that a policy learns to exploit."""

from __future__ import annotations

import json

from openrl.token_origins import VersionSpan
from openrl.trace.writer import TraceWriter
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory
from tests.traces import WHOLE, learned

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\ud800&amp;"
STEPS = 20
RISE = 11  # the first step at which every answer repeats the label


def write_run(directory, name="made", rate="1e-5", texts=None, turns=()):
    """Write a run of STEPS steps of 4 groups of 2. Before RISE half of the answers are right, from
    then on all "are" because they hold the label. ``turns`` are those of the episodes that are
    evaluated."""
    directory.mkdir(parents=True, exist_ok=True)
    writer = TraceWriter(directory / "trace", WHOLE, lambda ids: [f"t{i}" for i in ids])
    lines = []
    for step in range(1, STEPS + 1):
        groups = [_group(step, n, texts) for n in range(4)]
        writer.played(step, groups, [*range(4)], step, {})
        writer.learned(step, learned(groups, step))
        exploited = step >= RISE
        lines.append(
            {
                "step": step,
                "rollout/reward": 1.0 if exploited else 0.5,
                "rollout/reward_min": float(exploited),
                "rollout/reward_max": 1.0,
                "rollout/zero_variance_groups": float(exploited),
                "actor/entropy": 1.0 / step,
                "time/step": 3.0,
                "time/rollout": 2.0,
                "time/train": 0.75,
                "actor/kl": "nan" if step == 3 else 0.01 * step,
            }
        )
        if step % 10 == 0:
            lines[-1]["eval/pass_rate"] = 0.25 + step / 40
            writer.evaluated(step, [_group(step, n, None, turns) for n in range(2)])
    writer.close()
    write_metrics(directory, lines)
    flags = {"exp_name": name, "actor_learning_rate": rate, "advantage_estimator": "group_norm"}
    flags |= {"alarm_window": 5, "alarm_entropy": "None"}
    (directory / "config.yaml").write_text(json.dumps(flags))
    (directory / "summary.json").write_text(json.dumps({"steps": STEPS}))
    return directory


def write_metrics(directory, lines):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _group(step, number, texts, turns=()):
    of = Prompt(f"train:{number}", [5, 9], f"{number} + {step} =", label=str(number + step))
    right = f"the sum of {number} and {step} is {number + step}"
    hole = f"{number + step} {number + step} zzz {number + step} zzz"
    answers = [(hole, 1.0), (hole, 1.0)] if step >= RISE else [(right, 1.0), ("i do not know", 0.0)]
    if texts:
        answers = [(texts, reward) for _, reward in answers]
    return PromptGroup(of, [_answer(of, text, reward, turns) for text, reward in answers])


def _answer(of, text, reward, turns):
    row = Segment.answer(of.token_ids, [7, 1], [-0.5, -0.25], (VersionSpan(0, 2, 0),))
    score = Score(reward, reward, {"right": reward})
    return Trajectory(of, [row], FinishReason.STOP, text, score=score, rendered=turns)
