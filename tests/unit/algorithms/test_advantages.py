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
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),  # a rare success weighs 1 / 0.25 - 1
        ("maxrl", [0, 0], [0, 0]),
        ("maxrl", [-3, 1], [0, 0]),  # a mean below 0 is no likelihood
        ("rae", [1, 4, 1], [-1.5, 3, -1.5]),  # the mean of the other two
        ("rae", [7], [0]),
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
    batch = outcome_batch([2], [0], tokens=5, loss_mask=mask)
    done = credit(batch, "reinforce", DiscountOptions(gamma=0.5), whiten_advantages=False)
    assert done.advantages.tolist() == [[0, 0.5, 1, 0, 0, 2]]


def test_the_optimal_token_baseline_by_hand():
    """Norms 1 - 2 p + sum of q^2 are 0.5 a token in the first answer, and 1.5 in the second, which
    has one token: rewards 1 and 5 weigh 0.5 and 1.5 there, and no sibling is left after it."""
    mask = torch.tensor([[False, True, True], [False, True, False]])
    half, squares = torch.full((2, 3), math.log(0.5)).double(), torch.tensor([[0.5], [1.5]])
    columns = {"old_logprobs": half, "squares": squares.double().expand(2, 3)}
    batch = outcome_batch([1, 5], [0, 0], loss_mask=mask, **columns)
    advantages = credit(batch, "optimal_token_baseline").advantages
    assert advantages.flatten().tolist() == pytest.approx([0, -3, 0, 0, 1, 0])


def test_turn_returns_by_hand():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1]]).bool()
    process = torch.tensor([[0, 0, 1.0, 0, 2, 0, 0, 3]]).double()
    batch = outcome_batch([6], [0], tokens=7, loss_mask=mask, process_rewards=process)
    advantages = credit(batch, "turn_reinforce", TurnOptions(turn_gamma=0.5)).advantages
    assert advantages.tolist() == [[0, 2.75, 2.75, 0, 3.5, 0, 0, 3]]


def segments(*rows, reward, **columns):
    """One trajectory, whose rows have sampled tokens that earn these process rewards."""
    width = max(map(len, rows))
    padded = [[0.0, *row, *[0.0] * (width - len(row))] for row in rows]
    mask = torch.tensor([[False] + [i < len(row) for i in range(width)] for row in rows])
    given = {
        "loss_mask": mask,
        "trajectory_ids": torch.full((len(rows),), 3),
        "process_rewards": torch.tensor(padded).double(),
    }
    return outcome_batch([reward] * len(rows), [0] * len(rows), tokens=width, **given | columns)


def test_step_returns_by_hand():
    """Three steps earn 2, 0 and, of a reward of 3, the remaining 1."""
    batch = segments([0, 2], [0], [0, 0], reward=3)
    advantages = credit(batch, "step_reinforce", TurnOptions(turn_gamma=0.5)).advantages
    assert advantages.tolist() == [[0, 2.25, 2.25], [0, 0.5, 0], [0, 1, 1]]


def test_gigpo_by_hand():
    # trajectories of prompt 0 with three steps and one, one of prompt 1; states meet across
    # trajectories, not across prompts
    columns = {
        "trajectory_ids": torch.tensor([0, 0, 0, 1, 2]),
        "state_ids": torch.tensor([5, 6, 7, 5, 5]),
    }
    batch = outcome_batch([1, 1, 1, 0, 1], [0, 0, 0, 0, 1], **columns)
    half = math.sqrt(0.5)
    whole = [half, half, half, -half, 0]  # rewards 1 and 0, each counted once
    step = [half, 0, 0, -half, 0]  # returns 0.25 and 0 from state 5
    expected = [2 * e + 3 * s for e, s in zip(whole, step, strict=True)]
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
        ({"format": [1.0, 0.0]}, ("right",), "(?s)'right' is missing in some.*some of: format$"),
        (
            {"format": [1.0, torch.nan], "right": [1.0, 0.0]},
            (),
            "(?s)'format' is missing in some.*some of: right$",
        ),
        ({}, (), "the reward has no parts"),
    ],
)
def test_gdpo_refuses_rows_without_a_part(columns, words, message):
    parts = {name: torch.tensor(values).double() for name, values in columns.items()}
    with pytest.raises(UserError, match=message):
        credit(outcome_batch([1, 0], [0, 0], reward_parts=parts), "gdpo", PartOptions(words))


def test_steps_of_answers_of_one_turn():
    """Without an agent each answer is one turn, and one step from the prompt: the reward itself
    counts, and gigpo's two groups are one, so that it is group_norm times the sum of its
    weights."""
    states = torch.tensor([0, 0, 0, 1, 1])
    batch = outcome_batch([0, 1, 5, 2, 3], [0, 0, 0, 1, 1], state_ids=states)
    for name in ("step_reinforce", "turn_reinforce"):
        advantages = credit(batch, name, TurnOptions(turn_gamma=0.5)).advantages
        assert advantages.tolist() == [[0, r, r] for r in (0, 1, 5, 2, 3)]
    weighted = credit(
        batch, "gigpo", GiGPOOptions(gigpo_episode_weight=0.5, gigpo_step_weight=2.0)
    ).advantages
    torch.testing.assert_close(weighted, 2.5 * credit(batch, "group_norm").advantages)


@pytest.mark.parametrize("name", ["gae", "remax", "gigpo", "optimal_token_baseline"])
def test_missing_columns_are_named(name):
    with pytest.raises(ValueError, match=f"{name} needs"):
        credit(outcome_batch([1, 0], [0, 0]), name)


# -- the obvious version ---------------------------------------------------------------------------


def mean(values):
    return sum(values) / len(values) if values else 0.0


def standard(value, values):
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return (value - mean(values)) / (std + EPS) if std > EPS else 0.0


class Plain:
    """A batch as lists."""

    def __init__(self, batch):
        for name, column in vars(batch).items():
            setattr(self, name, column.tolist() if isinstance(column, torch.Tensor) else column)
        self.parts = {name: part.tolist() for name, part in batch.reward_parts.items()}
        ids = self.trajectory_ids
        self.rows = [[r for r in range(len(ids)) if ids[r] == own] for own in ids]
        self.tokens = [  # (row, index) of the trajectory's sampled ones, in the order of playing
            [(r, t) for r in rows for t, mine in enumerate(self.loss_mask[r]) if mine]
            for rows in self.rows
        ]
        # first rows of the trajectories with a sampled token
        self.alive = [r for r in range(len(ids)) if r == self.rows[r][0] and self.tokens[r]]


def earned(batch, row, reward):
    """{(row, index): reward} of the trajectory's sampled tokens: the rest at the end."""
    result = {(r, t): batch.process_rewards[r][t] for r, t in batch.tokens[row]}
    result[batch.tokens[row][-1]] += reward - sum(result.values())
    return result


def step_return(batch, row, gamma):
    steps = [r for r in batch.rows[row] if r >= row]
    gained = earned(batch, row, batch.rewards[row])
    return sum(
        gamma**i * sum(v for (r, _), v in gained.items() if r == step)
        for i, step in enumerate(steps)
    )


def obvious_score(batch, name, row, options):
    """The score of a row's trajectory by plain lists."""
    row, alive = batch.rows[row][0], batch.alive
    kin = [r for r in alive if batch.group_ids[r] == batch.group_ids[row]]
    mine, theirs = batch.rewards[row], [batch.rewards[r] for r in kin]
    if name in ("group_norm", "grpo"):
        return standard(mine, theirs)
    if name in ("dr_grpo", "reinforce_baseline"):
        return mine - mean(theirs)
    if name == "rloo":
        return mine - mean([batch.rewards[r] for r in kin if r != row]) if len(kin) > 1 else 0.0
    if name == "opo":
        lengths = [len(batch.tokens[r]) for r in kin]
        return mine - sum(x * n for x, n in zip(theirs, lengths, strict=True)) / sum(lengths)
    if name == "remax":
        return mine - batch.greedy_rewards[row]
    if name == "grpo_passk":
        if len(kin) < 2 or mine < max(theirs):
            return 0.0
        return (mine - sorted(theirs)[-2]) / (statistics.stdev(theirs) + EPS)
    if name == "gpg":
        groups = [batch.group_ids[r] for r in alive]
        lively = [number for number in groups if groups.count(number) > 1]
        return (mine - mean(theirs)) * len(alive) / len(lively)
    if name == "maxrl":
        score = (mine - mean(theirs)) / mean(theirs) if mean(theirs) > EPS else 0.0
        return min(max(score, -10), 10)  # --reward_clip_range
    if name == "rae":
        role = [
            r
            for r in alive
            if (batch.sources[r], batch.agents[r]) == (batch.sources[row], batch.agents[row])
        ]
        others = [batch.rewards[r] for r in role if r != row]
        return mine - mean(others) if others else 0.0
    if name == "hierarchical":
        peers = [
            r
            for r in kin
            if (batch.agents[r] == "solver") == (batch.agents[row] == "solver")
            and (batch.agents[r] != "solver" or batch.episodes[r] == batch.episodes[row])
        ]
        return mine - mean([batch.rewards[r] for r in peers])
    if name == "gdpo":
        return sum(
            weight * standard(batch.parts[part][row], [batch.parts[part][r] for r in kin])
            for part, weight in {"format": 1.0, "right": 2.0}.items()
        )
    if name == "gigpo":
        return options.gigpo_episode_weight * standard(mine, theirs)
    return mine


def obvious_step(batch, row, options):
    """GiGPO's part of a step, among those of the prompt that answer an equal observation."""
    same = [
        r
        for r in range(len(batch.rows))
        if any(batch.loss_mask[r])
        and batch.group_ids[r] == batch.group_ids[row]
        and batch.state_ids[r] == batch.state_ids[row]
    ]
    returns = {r: step_return(batch, r, options.gigpo_gamma) for r in same}
    return options.gigpo_step_weight * standard(returns[row], list(returns.values()))


AS_REWARDED = (
    "optimal_token_baseline",
    "gae",
    "reinforce",
    "reinforce_pp",
    "turn_reinforce",
    "step_reinforce",
)


def obvious_tokens(batch, name, row, kl, kl_coef, options):
    """{(row, index): advantage} of the sampled tokens of one trajectory."""
    tokens, score = batch.tokens[row], obvious_score(batch, name, row, options)
    gained = dict.fromkeys(tokens, 0.0) | {tokens[-1]: score}
    if name in AS_REWARDED:  # a score that is a comparison is one number
        gained = earned(batch, row, score)
    rewards = {(r, t): v - kl_coef * kl[r][t] for (r, t), v in gained.items()}
    gamma = options.gamma if name in ("gae", "reinforce") else 1.0
    result = {}
    if name in ("turn_reinforce", "step_reinforce"):
        unit = {(r, t): (r, batch.turn_ids[r][t]) for r, t in tokens}
        if name == "step_reinforce":
            unit = {(r, t): r for r, t in tokens}
        number = sorted(set(unit.values())).index
        for i, at in enumerate(tokens):
            later = tokens[i:]
            if name == "turn_reinforce":  # a turn is of one piece
                later = [u for u in tokens if unit[u] >= unit[at]]
            result[at] = sum(
                options.turn_gamma ** (number(unit[u]) - number(unit[at])) * rewards[u]
                for u in later
            )
    elif name == "optimal_token_baseline":
        togo, weight = {}, {}
        kin = [r for r in batch.alive if batch.group_ids[r] == batch.group_ids[row]]
        for r in kin:
            own = earned(batch, r, batch.rewards[r])
            own = [own[b, t] - kl_coef * kl[b][t] for b, t in batch.tokens[r]]
            norms = [
                1 - 2 * math.exp(batch.old_logprobs[b][t]) + batch.squares[b][t]
                for b, t in batch.tokens[r]
            ]
            togo[r] = [sum(own[i:]) for i in range(len(own))]
            weight[r] = [sum(norms[: i + 1]) for i in range(len(own))]
        mine = batch.rows[row][0]
        for i, at in enumerate(tokens):
            left = [r for r in kin if len(togo[r]) > i]
            total = max(sum(weight[r][i] for r in left), 1e-8)
            result[at] = togo[mine][i] - sum(togo[r][i] * weight[r][i] for r in left) / total
    elif name == "gae":
        value = [batch.values[r][t] for r, t in tokens] + [0.0]
        for i, at in enumerate(tokens):
            deltas = [rewards[u] + gamma * value[j + 1] - value[j] for j, u in enumerate(tokens)][
                i:
            ]
            result[at] = sum((gamma * options.lambd) ** k * delta for k, delta in enumerate(deltas))
    else:
        for i, at in enumerate(tokens):
            result[at] = sum(gamma**k * rewards[u] for k, u in enumerate(tokens[i:]))
    if name == "gigpo":
        step = {r: obvious_step(batch, r, options) for r, _ in tokens}
        result = {at: a + step[at[0]] for at, a in result.items()}
    return result


def in_segments(batch, rows):
    """The batch's rows as trajectories of so many rows each, those of one trajectory apart from
    each other; what belongs to a trajectory is that of its first row."""
    ids = first = torch.arange(len(batch)) % (len(batch) // rows)
    g = torch.Generator().manual_seed(rows)
    process = torch.randn(batch.loss_mask.shape, generator=g, dtype=torch.float64) * (rows > 1)
    return batch.replace(
        trajectory_ids=ids,
        process_rewards=process,
        sources=[batch.sources[r] for r in first.tolist()],
        agents=[batch.agents[r] for r in first.tolist()],
        reward_parts={name: part[first] for name, part in batch.reward_parts.items()},
        **{c: getattr(batch, c)[first] for c in OF_TRAJECTORIES},
    )


OF_TRAJECTORIES = ("rewards", "group_ids", "episodes", "truncated", "passed", "greedy_rewards")


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_obvious_version(name, kl_coef, rows):
    for seed in range(3):
        sizes = tuple(rows * n for n in ((4, 1, 3, 5) if rows < 5 else (2, 1, 2, 1)))
        batch = in_segments(random_batch(seed, sizes=sizes), rows)
        plain, options = Plain(batch), OPTIONS.get(name)
        kl = (batch.old_logprobs - batch.ref_logprobs).tolist()
        expected = {}
        for row in plain.alive:
            expected |= obvious_tokens(plain, name, row, kl, kl_coef, options)
        if advantage_estimators[name].suggests.get("whiten_advantages"):
            values = list(expected.values())
            expected = {
                at: (a - mean(values)) / statistics.pstdev(values) for at, a in expected.items()
            }
        got = credit(batch, name, options, kl_coef).advantages
        assert {at: float(got[at]) for at in expected} == pytest.approx(expected, abs=1e-6)
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
        for column in ("values", "squares", "old_logprobs", "ref_logprobs", "rollout_logprobs")
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
            "squares",
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
    advantages = credit(batch.replace(reward_parts=parts), name, OPTIONS.get(name)).advantages
    assert float(advantages.abs().max()) < 1e-9
