"""What openrl computes on small fixed examples, beside what other systems' published code does.

    python -m benchmarks.conformance            # writes docs/conformance.md

Our numbers are computed, formulas and remarks come from docs/algorithms.md, and the numbers of the
others from conformance.yaml. Whether two agree is found by comparing them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from benchmarks import conformance_trl
from openrl.algorithms.kl import KLCoefficient, kl_estimate
from openrl.algorithms.masked import step_loss
from openrl.algorithms.off_policy import importance_weights
from openrl.config.groups.rollout_correction import RolloutCorrectionFlags
from openrl.experience import LossInputs, StepCounts
from openrl.extension_points import advantage_estimators, policy_losses
from openrl.files import write_atomically
from tests.batches import credit, outcome_batch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/conformance.md"
REWARDS, GROUPS = [1, 0, 0, 1, 2, 2, 2, 2], [0] * 4 + [1] * 4
RATIOS, ADVANTAGES = [1.5, 0.5, 3.0, 0.5, 1.1], [1.0, 1.0, -1.0, -1.0, -1.0]
DIFFERENCES = [3.0, -3.0, 0.1]
WEIGHED = [[1.0, 2.0, 8.0], [0.1, 0.8, 1.0]]  # trainer / engine probability of two answers

Numbers = list[float]


def credited(*args: Any, **given: Any) -> Tensor:
    found = credit(*args, **given).advantages
    assert found is not None
    return found


def estimators() -> dict[str, Numbers]:
    """The advantage of each answer's last token."""
    batch = outcome_batch(
        REWARDS,
        GROUPS,
        values=torch.zeros(8, 3).double(),
        squares=torch.full((8, 3), 0.5).double(),
        old_logprobs=torch.full((8, 3), -1.0).double(),
        greedy_rewards=torch.tensor([0.0] * 4 + [2.0] * 4).double(),
        reward_parts={"right": torch.tensor(REWARDS).double()},
        state_ids=torch.zeros(8, dtype=torch.long),
        agents=["solver"] * 8,
        episodes=torch.tensor([0, 0, 1, 1, 0, 0, 1, 1]),
    )
    chosen = {"gae": advantage_estimators["gae"].options(gamma=1.0, lambd=0.95)}
    return {
        name: credited(batch, name, chosen.get(name))[:, -1].tolist()
        for name in advantage_estimators.names()
        if name not in ("grpo", "reinforce_pp")  # other names of the same
    }


def two_answers() -> LossInputs:
    """Two answers, of two and of three tokens."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]]).bool()
    old = torch.full(mask.shape, -1.0, dtype=torch.float64)
    new = old.masked_scatter(mask, torch.tensor(RATIOS).double().log() - 1)
    return LossInputs(
        logprobs=new,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.zeros_like(old).masked_scatter(mask, torch.tensor(ADVANTAGES).double()),
        loss_mask=mask,
        turn_ids=torch.where(mask, 0, -1),
        rewards=torch.tensor([1.0, -1.0]).double(),
        selected=torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]]).bool(),
        rollout_kl=torch.full_like(old, 0.1),
    )


def losses(**given: Any) -> dict[str, Numbers]:
    """The loss of each token of two answers."""
    inputs = two_answers()
    needed = {"dro": {"dro_beta": 0.1}}

    def of(entry: Any) -> Numbers:
        options = entry.options(**(needed.get(entry.name, {}) | given)) if entry.options else None
        return entry.component(inputs, options).per_token[inputs.loss_mask].tolist()

    names = ["ppo"] if given else policy_losses.names()
    return {name: of(policy_losses[name]) for name in names}


def aggregation() -> dict[str, Numbers]:
    """One number for the losses 1 2 3 and 4 of two answers; other numbers stand on padding."""
    per_token = torch.tensor([[1.0, 2, 3, 9], [4, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    counts = StepCounts(tokens=4, trajectories=2, dp_size=1)
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    return {mode: [float(step_loss(per_token, mask, counts, mode, 4))] for mode in modes}


def kl() -> dict[str, Numbers]:
    d = torch.tensor(DIFFERENCES, dtype=torch.float64)
    return {k: kl_estimate(d, torch.zeros(3), k).tolist() for k in ("k1", "abs", "k2", "k3")}


def coefficient() -> dict[str, Numbers]:
    """0.2 after a step with a KL of 0.12, of 0.5 and of 0.01."""
    found = []
    for measured in (0.12, 0.5, 0.01):
        controller = KLCoefficient(0.2, target=0.1, horizon=10000)
        controller.update(measured, 64)
        found.append(controller.coef)
    return {"adaptive": found}


def kl_slope() -> dict[str, Numbers]:
    d = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    kl_estimate(d, torch.zeros(1), "k3").backward()
    assert d.grad is not None
    return {"k3": d.grad.tolist()}


def norms() -> dict[str, Numbers]:
    """Rewards 1 0 0 1 and 1 1 1 0 of two prompts."""
    batch = outcome_batch([1, 0, 0, 1, 1, 1, 1, 0], GROUPS)
    scopes = {
        "group": ("group", "group"),
        "group, mean alone": ("group", "none"),
        "batch": ("batch", "batch"),
        "mean of the group, std of the batch": ("group", "batch"),
    }

    def of(mean: str, std: str) -> Tensor:
        chosen = {"reward_norm_mean": mean, "reward_norm_std": std, "whiten_advantages": False}
        return credited(batch, "reinforce", **chosen)

    return {name: of(*pair)[:, -1].tolist() for name, pair in scopes.items()}


def weights(log_rho: Tensor, **given: Any) -> Tensor:
    batch = outcome_batch([0.0] * len(log_rho), [0] * len(log_rho), tokens=log_rho.shape[1] - 1)
    return importance_weights(log_rho, batch, RolloutCorrectionFlags(**given))[:, 1:]


def corrections() -> dict[str, Numbers]:
    """Factors of the losses of two answers of three tokens, bounds 0.5 and 5."""
    log_rho = torch.tensor([[1.0, *row] for row in WEIGHED]).double().log()
    kinds = {f"tis, {level}": {"vllm_is_level": level} for level in ("token", "geometric")}
    kinds["tis, sequence"] = {"vllm_is_level": "sequence"}
    kinds |= {k: {"vllm_is_correction_type": k} for k in ("icepop", "seq-mask-tis")}
    return {k: weights(log_rho, **given).flatten().tolist() for k, given in kinds.items()}


def edges() -> dict[str, Numbers]:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1]]).bool()
    gap = outcome_batch([1], [0], tokens=5, loss_mask=mask, values=mask.double() / 2)
    options = {
        "gae": advantage_estimators["gae"].options(lambd=0.95),
        "reinforce": advantage_estimators["reinforce"].options(gamma=0.5),
    }
    over = {
        k: credited(gap, k, given, whiten_advantages=False)[mask].tolist()
        for k, given in options.items()
    }
    far = torch.full((1, 2), -300.0).double()
    one = torch.tensor([[False, True]])
    token = LossInputs(far + 200, far, far, -one.double(), one, one.long() - 1, far[:, 0])
    ppo = policy_losses["ppo"]
    icepop = weights(torch.tensor([[0.0, 100.0]]), vllm_is_correction_type="icepop")
    return {
        "gae over a gap": over["gae"],
        "reinforce over a gap": over["reinforce"][:1],
        "dr_grpo, clipped": credited(outcome_batch([100, -100], [0, 0]), "dr_grpo")[:, -1].tolist(),
        "ppo, log rho 200": [float(ppo.component(token, ppo.options()).per_token[0, 1])],
        "icepop, 100 nats": icepop[0].tolist(),
    }


@cache
def beside_trl() -> list[tuple[str, float, float]]:
    """(name, our loss, TRL's loss) of a step over the two answers."""
    return list(conformance_trl.rows(two_answers()))


SECTIONS: dict[str, Callable[[], dict[str, Numbers]]] = {
    "estimators": estimators,
    "norms": norms,
    "losses": losses,
    "dual clip": lambda: losses(dual_clip=1.4),
    "whole losses": lambda: {name: [ours] for name, ours, _ in beside_trl()},
    "aggregation": aggregation,
    "kl": kl,
    "kl slope": kl_slope,
    "coefficient": coefficient,
    "corrections": corrections,
    "edges": edges,
}


def agree(ours: Numbers, theirs: str) -> bool:
    """Whether numbers are equal as far as the digits of the others go, and at most by 0.2 %."""

    def equal(a: float, text: str) -> bool:
        b = float(text)
        if not math.isfinite(b):
            return a == b
        digit = 10.0 ** int(Decimal(text).as_tuple().exponent)
        return abs(a - b) <= min(0.6 * digit, max(2e-3 * abs(b), 1e-6))

    texts = theirs.split()
    return len(ours) == len(texts) and all(map(equal, ours, texts))


def remarks() -> dict[str, tuple[str, str]]:
    """name -> (formula, how others differ), of the tables of docs/algorithms.md."""
    found: dict[str, tuple[str, str]] = {}
    section = ""
    for line in (ROOT / "docs/algorithms.md").read_text().splitlines():
        section = line[3:] if line.startswith("## ") else section
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) in (3, 4):
            for name in re.findall(r"`([\w-]+)`", cells[0]):
                found[f"{section}/{name}"] = cells[1], cells[-1].removesuffix("|").strip()
    return found


HOMES = {
    "estimators": "Advantage estimators",
    "losses": "Policy losses",
    "dual clip": "Policy losses",
    "aggregation": "From token losses to one number",
    "kl": "KL to the reference",
}


@cache
def facts() -> dict[str, Any]:
    """What is known of others: conformance.yaml, and what the installed TRL computes."""
    found = yaml.safe_load((ROOT / "benchmarks/conformance.yaml").read_text())
    trl = conformance_trl.installed()
    found["commits"][trl] = "PyPI"
    found["facts"]["whole losses"] = {
        name: [{"systems": [trl], "how": "run", "numbers": f"{theirs:.6g}"}]
        for name, _, theirs in beside_trl()
    }
    for name, setting in conformance_trl.SETTINGS.items():
        formula = f"`{setting.ours}`, `{setting.mode}`"
        found["formulas"].setdefault("whole losses", {})[name] = formula
    return found


def show(numbers: Numbers) -> str:
    return " ".join(f"{round(n, 12) + 0:.5g}" for n in numbers)


def row(section: str, name: str, ours: Numbers) -> str:
    """One line of a table: formula, our numbers, those of others, who differs and why."""
    known = facts()
    formula, remark = remarks().get(f"{HOMES.get(section)}/{name}", ("", ""))
    formula = formula or known["formulas"][section][name]
    theirs, verdicts = [], []
    for fact in known["facts"].get(section, {}).get(name, []):
        commits = [f"{system} ({known['commits'][system]})" for system in fact["systems"]]
        theirs.append(f"{', '.join(commits)}, {fact['how']}: {fact['numbers']}")
        who = ", ".join(fact["systems"])
        if agree(ours, fact["numbers"]):
            verdicts.append(f"{who}: equal")
        else:
            verdicts.append(f"**{who}: other numbers.** Right is {fact['why']}")
    if remark and not any("why" in fact for fact in known["facts"].get(section, {}).get(name, [])):
        verdicts.append(remark)
    cells = [f"`{name}`", formula, show(ours), "; ".join(theirs), "; ".join(verdicts)]
    return "| " + " | ".join(cells).replace("|  |", "| |").rstrip() + " |"


def page() -> str:
    lines = [facts()["introduction"].rstrip()]
    for section, compute in SECTIONS.items():
        about = facts()["sections"][section]
        lines += ["", f"## {about['title']}", "", about["example"], ""]
        lines += ["| name | formula | here | elsewhere, on this example | who differs |"]
        lines += ["|---|---|---|---|---|"]
        lines += [row(section, name, ours) for name, ours in compute().items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_atomically(PAGE, page())
