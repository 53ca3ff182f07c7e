"""docs/conformance.md says what the code computes today, and names those who differ."""

from __future__ import annotations

import pytest

from benchmarks import conformance
from openrl.extension_points import advantage_estimators, policy_losses

DIFFERENT = {
    ("aggregation", "token-mean", "ROLL"),
    ("aggregation", "seq-mean-token-sum-norm", "ROLL"),
    ("kl slope", "k3", "EasyR1"),
    ("kl slope", "k3", "verl"),
    ("coefficient", "adaptive", "MindSpeed-RL"),
    ("edges", "ppo, log rho 200", "OpenRLHF 0.9.2"),
    *(("edges", name, f"OpenRLHF {version}") for version in ("0.9.2", "0.11.0")
       for name in ("gae over a gap", "reinforce over a gap", "icepop, 100 nats")),
}  # fmt: skip


def test_the_page_has_the_numbers_of_the_code():
    """Run python -m benchmarks.conformance after a change of formulas."""
    assert conformance.PAGE.read_text() == conformance.page()


def test_who_differs():
    found = set()
    for section, compute in conformance.SECTIONS.items():
        ours = compute()
        facts = conformance.facts()["facts"].get(section, {})
        assert facts.keys() <= ours.keys()
        for name, stated in facts.items():
            for fact in stated:
                if not conformance.agree(ours[name], fact["numbers"]):
                    assert fact["why"]
                    found |= {(section, name, system) for system in fact["systems"]}
    assert found == DIFFERENT


def test_every_estimator_and_loss_is_there():
    others = {"grpo", "reinforce_pp"}  # other names of the same
    assert conformance.estimators().keys() == set(advantage_estimators.names()) - others
    assert conformance.losses().keys() == set(policy_losses.names())


@pytest.mark.parametrize(
    ("ours", "theirs", "equal"),
    [
        ([0.86603], "0.866", True),
        ([0.2002], "0.2000", False),
        ([0.45], "0.5", False),
        ([4.8517e8], "4.85e8", True),
        ([0.0], "nan", False),
        ([1.0], "inf", False),
        ([1.0], "1 1", False),
    ],
)
def test_numbers_are_equal_as_far_as_their_digits_go(ours, theirs, equal):
    assert conformance.agree(ours, theirs) is equal


def test_by_hand():
    """gspo: exp((log 1.5 + log 0.5) / 2) = sqrt(0.75); token-mean: (1 + 2 + 3 + 4) / 4."""
    assert conformance.losses()["gspo"][0] == pytest.approx(-(0.75**0.5))
    assert conformance.aggregation()["token-mean"] == [2.5]
    assert conformance.corrections()["tis, geometric"][0] == pytest.approx(16 ** (1 / 3))
    assert conformance.edges()["gae over a gap"][1] == pytest.approx(0.475)  # 0.95 * (1 - 0.5)
