"""Every estimator against the figures of its sources, an obvious version in Python loops, and its
invariances."""

import math
import statistics

import pytest
import torch

from openrl.algorithms.advantages import (
    DiscountOptions,
    GAEOptions,
    GiGPOOptions,
    PartOptions,
    TurnOptions,
    returns_to_go,
)
from openrl.errors import UserError
from openrl.extension_points import advantage_estimators
from tests.batches import credit, outcome_batch, random_batch

EPS = 1e-6
OPTIONS = {
    "gae": GAEOptions(gamma=0.9, lambd=0.8),
    "reinforce": DiscountOptions(gamma=0.9),
    "turn_reinforce": TurnOptions(turn_gamma=0.5),
    "step_reinforce": TurnOptions(turn_gamma=0.5),
    "gdpo": PartOptions(gdpo_parts=("format", "right=2")),
    "gigpo": GiGPOOptions(gigpo_episode_weight=0.7, gigpo_step_weight=1.3, gigpo_gamma=0.9),
}
NAMES = [name for name in advantage_estimators.names() if name not in ("grpo", "reinforce_pp")]

# -- figures of the sources ------------------------------------------------------------------------

OPENRLHF = {  # rewards [1,0,0,1 | 2,2,2,2], two sampled tokens each, no KL
    "reinforce": [-0.3015, -1.5076, -1.5076, -0.3015] + [0.9045] * 4,
    "rloo": [0.6667, -0.6667, -0.6667, 0.6667, 0, 0, 0, 0],
    "reinforce_baseline": [1.4142, -1.4142, -1.4142, 1.4142, 0, 0, 0, 0],
    "group_norm": [0.866, -0.866, -0.866, 0.866, 0, 0, 0, 0],
    "dr_grpo": [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0],
    "gae": [-0.2703, -1.5059, -1.5059, -0.2703] + [0.9653] * 4,
}


@pytest.mark.parametrize(("name", "expected"), OPENRLHF.items())
def test_openrlhf_figures(name, expected):
    batch = outcome_batch(
        [1, 0, 0, 1, 2, 2, 2, 2], [0] * 4 + [1] * 4, values=torch.zeros(8, 3).double()
    )
    options = GAEOptions(gamma=1, lambd=0.95) if name == "gae" else None
    advantages = credit(batch, name, options).advantages
    assert advantages[:, -1].tolist() == pytest.approx(expected, abs=1e-4)
    assert advantages[:, 0].tolist() == [0] * 8


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1, 2], [-0.7071, 0.7071]),
        ("opo", [1, 3], [-1, 1]),  # equal lengths: the plain mean
        ("grpo_passk", [1, 4, 2], [0, 2 / statistics.stdev([1, 4, 2]), 0]),
        ("grpo_passk", [4, 4, 1], [0, 0, 0]),
        ("gpg", [-1, 1], [-1, 1]),  # every group has a signal: no factor
    ],
)
def test_one_group_by_hand(name, rewards, expected):
    advantages = credit(outcome_batch(rewards, [0] * len(rewards)), name).advantages
    assert advantages[:, -1].tolist() == pytest.approx(expected, abs=1e-4)


def test_gpg_makes_up_for_groups_without_signal():
    batch = outcome_batch([0, 2, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2])
    assert credit(batch, "gpg").advantages[:, -1].tolist() == pytest.approx([-3, 3, 0, 0, 0, 0])


def test_opo_weighs_by_length():
    batch = outcome_batch([1, 4], [0, 0], tokens=3)
    mask = batch.loss_mask.clone()
    mask[1, 2:] = False  # 3 tokens and 1
    advantages = credit(batch.replace(loss_mask=mask), "opo").advantages
    assert advantages[:, 1].tolist() == pytest.approx([1 - 7 / 4, 4 - 7 / 4])


def test_gae_and_returns_by_hand():
    batch = outcome_batch([1], [0], tokens=3, values=torch.tensor([[9, 0.5, 0.6, 0.7]]).double())
    done = credit(batch, "gae", GAEOptions(gamma=0.9, lambd=0.95), whiten_advantages=False)
    assert done.advantages[0, 1:].tolist() == pytest.approx([0.2849575, 0.2865, 0.3])
    assert done.returns[0, 1:].tolist() == pytest.approx([0.7849575, 0.8865, 1.0])
    done = credit(batch, "reinforce", DiscountOptions(gamma=0.9), whiten_advantages=False)
    assert done.advantages[0, 1:].tolist() == pytest.approx([0.81, 0.9, 1])


def test_gae_over_a_gap_of_environment_tokens():
    """As without the gap; walking over it as real steps would give 0.361, 0.380 and 0.5."""
    mask, values = torch.tensor([[0, 1, 1, 0, 0, 1]]).bool(), torch.full((1, 6), 0.5).double()
    batch = outcome_batch([1], [0], tokens=5, loss_mask=mask, values=values)
    advantages = credit(batch, "gae", GAEOptions(lambd=0.95), whiten_advantages=False).advantages
    assert advantages.tolist() == [
        [0, pytest.approx(0.45125), pytest.approx(0.475), 0, 0, pytest.approx(0.5)]
    ]


def test_one_token_is_not_whitened():
    mask = torch.tensor([[0, 0, 1, 0]]).bool()
    batch = outcome_batch([3], [0], tokens=3, loss_mask=mask)
    assert credit(batch, "reinforce", DiscountOptions(gamma=0)).advantages.tolist() == [
        [0, 0, 3, 0]
    ]


def test_environment_tokens_do_not_discount():
    mask = torch.tensor([[False, True, True, False, False, True]])
    rewards = torch.tensor([[0.0, 0, 0, 99, 99, 2]])
    assert returns_to_go(rewards, mask, 0.5).tolist() == [[0, 0.5, 1, 0, 0, 2]]


def test_turn_returns_by_hand():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1]]).bool()
    process = torch.tensor([[0, 0, 1.0, 0, 2, 0, 0, 3]]).double()
    batch = outcome_batch([6], [0], tokens=7, loss_mask=mask, process_rewards=process)
    advantages = credit(batch, "turn_reinforce", TurnOptions(turn_gamma=0.5)).advantages
    assert advantages.tolist() == [[0, 2.75, 2.75, 0, 3.5, 0, 0, 3]]


def test_step_returns_by_hand():
    steps = {
        "episode_ids": torch.zeros(3).long(),
        "step_ids": torch.tensor([1, 0, 2]),
        "state_ids": torch.arange(3),
    }
    batch = outcome_batch([0, 0, 1], [0, 0, 0], **steps)
    advantages = credit(batch, "step_reinforce", TurnOptions(turn_gamma=0.95)).advantages
    assert advantages[:, -1].tolist() == pytest.approx([0.95, 0.9025, 1])


def test_gigpo_by_hand():
    # two episodes of prompt 0 (three steps and one), one of prompt 1; states meet across episodes,
    # not across prompts
    columns = {
        "episode_ids": torch.tensor([0, 0, 0, 1, 2]),
        "step_ids": torch.tensor([0, 1, 2, 0, 0]),
        "state_ids": torch.tensor([5, 6, 7, 5, 5]),
    }
    batch = outcome_batch([0, 0, 1, 0, 1], [0, 0, 0, 0, 1], **columns)
    half = math.sqrt(0.5)
    episode = [half, half, half, -half, 0]  # totals 1 and 0, each counted once
    step = [half, 0, 0, -half, 0]  # returns 0.25 and 0 from state 5
    expected = [2 * e + 3 * s for e, s in zip(episode, step, strict=True)]
    options = GiGPOOptions(gigpo_episode_weight=2, gigpo_step_weight=3, gigpo_gamma=0.5)
    assert credit(batch, "gigpo", options).advantages[:, -1].tolist() == pytest.approx(
        expected, abs=1e-4
    )


def test_gdpo_by_hand():
    """Standardised, both parts are (-h, h) in group 0; in group 1 the first is flat. Named ones
    count, others do not."""
    parts = {"a": [0, 1, 5, 5], "b": [0, 10, 3, 1], "length": [9, 1, 2, 3]}
    columns = {name: torch.tensor(values).double() for name, values in parts.items()}
    batch, half = outcome_batch([0] * 4, [0, 0, 1, 1], reward_parts=columns), math.sqrt(0.5)
    options = PartOptions(gdpo_parts=("a", "b=0.5"))
    scores = credit(batch, "gdpo", options).scores
    assert scores.tolist() == pytest.approx(
        [-1.5 * half, 1.5 * half, 0.5 * half, -0.5 * half], abs=1e-5
    )
    everything = credit(batch, "gdpo").scores
    assert everything.tolist() == pytest.approx([-half, half, 0, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("columns", "words", "message"),
    [
        ({"format": [1.0, torch.nan]}, (), "'format' is missing in some"),
        ({"format": [1.0, 0.0]}, ("right",), "'right' is missing in some"),
        ({}, (), "the reward has no parts"),
    ],
)
def test_gdpo_refuses_rows_without_a_part(columns, words, message):
    parts = {name: torch.tensor(values).double() for name, values in columns.items()}
    with pytest.raises(UserError, match=message):
        credit(outcome_batch([1, 0], [0, 0], reward_parts=parts), "gdpo", PartOptions(words))


def test_steps_of_answers_of_one_turn():
    """Without an agent each answer is one turn, and an episode of one step from the prompt: the
    reward itself counts, and gigpo's two groups are one, so that it is group_norm times the sum of
    its weights."""
    alone = {
        "episode_ids": torch.arange(5),
        "step_ids": torch.zeros(5).long(),
        "state_ids": torch.tensor([0, 0, 0, 1, 1]),
    }
    batch = outcome_batch([0, 1, 5, 2, 3], [0, 0, 0, 1, 1], **alone)
    for name in ("step_reinforce", "turn_reinforce"):
        advantages = credit(batch, name, TurnOptions(turn_gamma=0.5)).advantages
        assert advantages.tolist() == [[0, r, r] for r in (0, 1, 5, 2, 3)]
    weighted = credit(
        batch, "gigpo", GiGPOOptions(gigpo_episode_weight=0.5, gigpo_step_weight=2.0)
    ).scores
    torch.testing.assert_close(weighted, 2.5 * credit(batch, "group_norm").scores)


@pytest.mark.parametrize("name", ["gae", "remax", "gigpo"])
def test_missing_columns_are_named(name):
    with pytest.raises(ValueError, match=f"{name} needs"):
        credit(outcome_batch([1, 0], [0, 0]), name)


# -- the obvious version ---------------------------------------------------------------------------


def mean(values):
    return sum(values) / len(values) if values else 0.0


def standard(value, values):
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return (value - mean(values)) / (std + EPS) if std > EPS else 0.0


def step_return(batch, row, gamma):
    later = [r for r in range(len(batch)) if batch.episode_ids[r] == batch.episode_ids[row]]
    later = sorted(
        (r for r in later if batch.step_ids[r] >= batch.step_ids[row]),
        key=lambda r: batch.step_ids[r],
    )
    return sum(gamma**i * float(batch.rewards[r]) for i, r in enumerate(later))


def obvious_score(batch, name, row, options):
    """The score of one row by plain lists."""
    alive = [r for r in range(len(batch)) if batch.loss_mask[r].any()]
    kin = [r for r in alive if batch.group_ids[r] == batch.group_ids[row]]
    mine, theirs = float(batch.rewards[row]), [float(batch.rewards[r]) for r in kin]
    if name in ("group_norm", "grpo"):
        return standard(mine, theirs)
    if name in ("dr_grpo", "reinforce_baseline"):
        return mine - mean(theirs)
    if name == "rloo":
        return (
            mine - mean([float(batch.rewards[r]) for r in kin if r != row]) if len(kin) > 1 else 0.0
        )
    if name == "opo":
        lengths = [int(batch.loss_mask[r].sum()) for r in kin]
        return mine - sum(x * n for x, n in zip(theirs, lengths, strict=True)) / sum(lengths)
    if name == "remax":
        return mine - float(batch.greedy_rewards[row])
    if name == "grpo_passk":
        if len(kin) < 2 or mine < max(theirs):
            return 0.0
        return (mine - sorted(theirs)[-2]) / (statistics.stdev(theirs) + EPS)
    if name == "gpg":
        lively = [
            r
            for r in alive
            if sum(int(batch.group_ids[o]) == int(batch.group_ids[r]) for o in alive) > 1
        ]
        return (mine - mean(theirs)) * len(alive) / len(lively)
    if name == "gdpo":
        parts = {"format": 1.0, "right": 2.0}
        columns = {part: batch.reward_parts[part] for part in parts}
        return sum(
            w * standard(float(columns[p][row]), [float(columns[p][r]) for r in kin])
            for p, w in parts.items()
        )
    if name == "step_reinforce":
        return step_return(batch, row, options.turn_gamma)
    if name == "gigpo":
        episodes = {int(batch.episode_ids[r]) for r in kin}
        totals = {
            e: sum(float(batch.rewards[r]) for r in kin if int(batch.episode_ids[r]) == e)
            for e in episodes
        }
        same = [r for r in kin if batch.state_ids[r] == batch.state_ids[row]]
        returns = {r: step_return(batch, r, options.gigpo_gamma) for r in same}
        return options.gigpo_episode_weight * standard(
            totals[int(batch.episode_ids[row])], list(totals.values())
        ) + options.gigpo_step_weight * standard(returns[row], list(returns.values()))
    return mine


def obvious_tokens(batch, name, row, score, kl, kl_coef, options):
    """Advantages of one row's sampled tokens, {index: advantage}."""
    tokens = [t for t in range(batch.loss_mask.shape[1]) if batch.loss_mask[row, t]]
    rewards = {t: -kl_coef * kl[row][t] + (score if t == tokens[-1] else 0.0) for t in tokens}
    gamma = options.gamma if name in ("gae", "reinforce") else 1.0
    result = {}
    if name == "turn_reinforce":
        turns = sorted({int(batch.turn_ids[row, t]) for t in tokens})
        for turn in turns:
            worth = 0.0
            for later in (x for x in turns if x >= turn):
                earned = sum(rewards[t] for t in tokens if int(batch.turn_ids[row, t]) == later)
                worth += options.turn_gamma ** (later - turn) * earned
            result |= {t: worth for t in tokens if int(batch.turn_ids[row, t]) == turn}
    elif name == "gae":
        value = [float(batch.values[row, t]) for t in tokens] + [0.0]
        for i, t in enumerate(tokens):
            deltas = [rewards[u] + gamma * value[j + 1] - value[j] for j, u in enumerate(tokens)][
                i:
            ]
            result[t] = sum((gamma * options.lambd) ** k * delta for k, delta in enumerate(deltas))
    else:
        for i, t in enumerate(tokens):
            result[t] = sum(gamma**k * rewards[u] for k, u in enumerate(tokens[i:]))
    return result


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_obvious_version(name, kl_coef):
    for seed in range(3):
        batch, options = random_batch(seed), OPTIONS.get(name)
        kl = (batch.old_logprobs - batch.ref_logprobs).tolist()
        alive = [r for r in range(len(batch)) if batch.loss_mask[r].any()]
        expected = {
            (row, t): a
            for row in alive
            for t, a in obvious_tokens(
                batch, name, row, obvious_score(batch, name, row, options), kl, kl_coef, options
            ).items()
        }
        if advantage_estimators[name].suggests.get("whiten_advantages"):
            values = list(expected.values())
            expected = {
                at: (a - mean(values)) / statistics.pstdev(values) for at, a in expected.items()
            }
        got = credit(batch, name, options, kl_coef).advantages
        assert {(r, t): float(got[r, t]) for r, t in expected} == pytest.approx(expected, abs=1e-6)
        assert float(got.masked_fill(batch.loss_mask, 0).abs().max()) == 0


# -- invariances -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_permuting_rows_permutes_the_result(name):
    batch = random_batch(1, width=9)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)).tolist()
    direct = credit(batch, name, OPTIONS.get(name), 0.1)
    shuffled = credit(batch.select(order), name, OPTIONS.get(name), 0.1)
    width = shuffled.advantages.shape[1]
    assert torch.allclose(shuffled.advantages, direct.advantages[order][:, :width], atol=1e-9)
    assert torch.allclose(shuffled.returns, direct.returns[order][:, :width], atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_sampled_tokens_change_nothing(name):
    batch = random_batch(2)  # row 2 has none
    others = [r for r in range(len(batch)) if r != 2]
    loud = batch.replace(rewards=batch.rewards.index_fill(0, torch.tensor([2]), 1e3))
    with_it, without = (
        credit(b, name, OPTIONS.get(name), 0.1) for b in (loud, batch.select(others))
    )
    assert torch.allclose(
        with_it.advantages[others][:, : without.advantages.shape[1]], without.advantages, atol=1e-9
    )
    assert float(with_it.advantages[2].abs().max()) == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_environment_tokens_carry_changes_nothing(name):
    batch = random_batch(3)
    outside = ~batch.loss_mask
    noise = {
        column: getattr(batch, column).masked_fill(outside, 77.0)
        for column in ("values", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    plain, noisy = (
        credit(b, name, OPTIONS.get(name), 0.1) for b in (batch, batch.replace(**noise))
    )
    assert torch.equal(plain.advantages, noisy.advantages)
    assert torch.equal(plain.returns, noisy.returns)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "turn_reinforce"])
def test_inserted_environment_tokens_change_nothing(name):
    batch = random_batch(4, width=8)
    at = [0, 1, 2, 3, 3, 3, 4, 5, 6, 7]  # two copies of column 3, neither sampled
    columns = {
        f: getattr(batch, f)[:, at]
        for f in [
            "token_ids",
            "attention_mask",
            "rollout_logprobs",
            "old_logprobs",
            "ref_logprobs",
            "values",
            "turn_ids",
        ]
    }
    mask = batch.loss_mask[:, at].clone()
    mask[:, 4:6] = False
    longer = batch.replace(loss_mask=mask, **columns)
    plain, padded = (credit(b, name, OPTIONS.get(name), 0.1).advantages for b in (batch, longer))
    assert torch.allclose(padded[:, [0, 1, 2, 3, 6, 7, 8, 9]], plain, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_finite_for_extreme_and_for_equal_rewards(name):
    batch = random_batch(5)
    for rewards in (
        1e30 * batch.rewards,
        1e-30 * batch.rewards,
        torch.full_like(batch.rewards, 0.1),
    ):
        extreme = batch.replace(rewards=rewards, old_logprobs=1e4 * batch.old_logprobs)
        done = credit(extreme, name, OPTIONS.get(name), 0.1)
        assert bool(done.advantages.isfinite().all() and done.returns.isfinite().all())


@pytest.mark.parametrize(
    "name", ["group_norm", "rloo", "dr_grpo", "grpo_passk", "opo", "gpg", "gdpo", "gigpo"]
)
def test_equal_rewards_teach_nothing(name):
    batch = random_batch(6).replace(rewards=torch.full((13,), 0.1, dtype=torch.float64))
    parts = {name: torch.full((13,), 0.3, dtype=torch.float64) for name in ("right", "format")}
    steps = {"episode_ids": torch.arange(13), "step_ids": torch.zeros(13).long()}
    advantages = credit(
        batch.replace(reward_parts=parts, **steps), name, OPTIONS.get(name)
    ).advantages
    assert float(advantages.abs().max()) < 1e-9
