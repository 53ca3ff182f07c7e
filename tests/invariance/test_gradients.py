"""An optimizer step has one gradient, whatever its cut into ranks and micro-batches, by rows or by
tokens, padded or packed, with what rows have in common computed for each or once.

Every policy loss under every aggregation, and every other term of a loss, in fp64 on a model that
computes nothing in less. DeepSpeed reduces no fp64, so ranks average their gradients here by a
plain all-reduce; ``test_ranks`` has DeepSpeed in fp32. The ranks are spawned once and run every
case."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from openrl.algorithms.batching import TokenCap, plan_pairs, plan_steps
from openrl.algorithms.collate import turn_ids
from openrl.algorithms.observations import mark_observed
from openrl.algorithms.off_policy import correct_rollouts
from openrl.algorithms.partition import RowCost
from openrl.algorithms.policy_losses import (
    ClipOptions,
    DROOptions,
    FlashReinforceOptions,
    PPOOptions,
)
from openrl.algorithms.row_sizes import RowSizes
from openrl.algorithms.score_centering import ScoreCenteringOptions
from openrl.algorithms.selecting_losses import (
    ClipCovOptions,
    KLCovOptions,
    SelectingLoss,
    select_tokens,
)
from openrl.config.groups.rollout_correction import RolloutCorrectionFlags
from openrl.experience import ExperienceBatch, PreferenceBatch, TokenBatch
from openrl.extension_points import advantage_estimators, policy_losses, preference_losses
from openrl.models.attention import VARLEN
from openrl.models.causal_lm import CausalLM
from openrl.models.headed import Origins
from openrl.models.kept import KeptIds
from openrl.models.logits import COMPARISONS
from openrl.models.scalar_model import Head, RewardModel, ValueModel
from openrl.token_origins import KeptSets
from openrl.training_engine.distributed import close_distributed, init_distributed
from openrl.training_engine.preference_updates import PairRewardUpdate, PreferenceUpdate
from openrl.training_engine.updates import PolicyUpdate, SupervisedUpdate, ValueUpdate
from tests.batches import credit, in_segments
from tests.experience import PROMPT, alike, assert_same_gradient, on_ranks, ragged_batch
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

# seven rows: the second of two ranks has a row less, and once a dummy
LENGTHS = (12, 7, 9, 5, 12, 4, 8)
GROUPS = (0, 0, 0, 1, 1, 2, 2)
# tokens that the rows of a group have in common, in one also of their answers
BEGINNINGS = (PROMPT, PROMPT + 1, PROMPT)
# By ranks: (micro-batches of a rank, rows or tokens of one, how they run). Pairs are two rows: they
# fill more.
PADDED, PACKED, SHARED = (False, False), (True, False), (True, True)
CUTS = {
    1: ((1, 7, PADDED), (1, 7, PACKED), (2, 4, PACKED), (4, 2, PADDED), (None, TokenCap(24), PACKED),
        (1, 7, SHARED), (None, 3, SHARED), (None, TokenCap(24), SHARED)),
    2: ((1, 4, PACKED), (2, 2, PADDED), (4, 1, PACKED), (None, TokenCap(24), PACKED), (None, TokenCap(40), PACKED),
        (None, 4, SHARED), (None, TokenCap(24), SHARED)),
}  # fmt: skip
BY_COST = RowCost(0.1)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OPTIONS = {  # where the defaults would act on no token of so few
    "clip_cov": ClipCovOptions(clip_cov_ratio=0.2, clip_cov_range=(0.1, 5.0)),
    "kl_cov": KLCovOptions(kl_cov_ratio=0.2),
    "gspo": ClipOptions(eps_clip=0.05),
    "luspo": ClipOptions(eps_clip=0.05),
    "dro": DROOptions(dro_beta=0.1),
    "flash_reinforce": FlashReinforceOptions(flash_kl_threshold=0.05),
    "score_centering": ScoreCenteringOptions(
        centering_weight="tis", centering_weight_range=(0.8, 1.25)
    ),
}


@dataclass(frozen=True)
class Case:
    update: PolicyUpdate | ValueUpdate | SupervisedUpdate | PreferenceUpdate | PairRewardUpdate
    without: tuple[str, ...] = ()  # columns that the batch lacks
    cut: bool = False  # its tokens were drawn from sets

    @property
    def model(self) -> str:
        return {ValueUpdate: "values", PairRewardUpdate: "rewards"}.get(
            type(self.update), "logprobs"
        )

    @property
    def pairs(self) -> bool:
        rated = (
            isinstance(self.update, PreferenceUpdate)
            and "ratings" in preference_losses[self.update.loss].needs
        )
        return isinstance(self.update, (PreferenceUpdate, PairRewardUpdate)) and not rated


def correction(level: str, kind: str) -> RolloutCorrectionFlags:
    """Bounds that some weights of the batch exceed on either side."""
    return RolloutCorrectionFlags(
        enable_vllm_is_correction=True,
        vllm_is_level=level,
        vllm_is_correction_type=kind,
        vllm_is_truncated_threshold=(0.8, 1.25),
    )


def options_of(registry, name):
    made = registry[name].options
    return OPTIONS[name] if name in OPTIONS else made and made()


def policy_cases():
    ppo = PolicyUpdate(
        "ppo", PPOOptions(dual_clip=3.0), "token-mean", kl_coef=0.3, kl_estimator="k3+"
    )
    every_term = replace(ppo, entropy_coef=0.2, sft_coef=0.4, rl_coef=0.7)
    # a loss gives values per token and knows nothing of the mode: ppo in each, others in turn
    for name, mode in zip(policy_losses.names(), cycle(MODES), strict=False):
        yield name, Case(PolicyUpdate(name, options_of(policy_losses, name), mode, 9.0))
    for mode in MODES:
        yield f"ppo-{mode}", Case(replace(ppo, kl_coef=0.0, agg_mode=mode, norm_const=9.0))
        yield f"every_term-{mode}", Case(replace(every_term, agg_mode=mode, norm_const=9.0))
        yield f"values-{mode}", Case(ValueUpdate(0.2, mode, 9.0))
    yield "observations", Case(replace(every_term, observation_coef=0.5))
    yield "without_weights", Case(every_term, without=("loss_weights", "is_weights"))
    yield "old_is_own", Case(ppo, without=("old_logprobs",))
    yield "cut", Case(replace(every_term, kl_estimator="full"), cut=True)
    weighed = replace(ppo, kl_coef=0.0, correction=correction("segment", "icepop"))
    yield "weighed_by_own", Case(weighed, without=("old_logprobs", "is_weights"))
    alone = replace(ppo, rl_coef=0.0, kl_coef=0.0)
    yield "entropy", Case(replace(alone, entropy_coef=-0.2))
    yield "sft", Case(replace(alone, sft_coef=0.4, sft_threshold=-0.5))
    for estimator in ("k1", "k2", "k3", "abs", "k1+", "k3+", "full"):
        kl = PolicyUpdate("gpg", None, "token-mean", kl_coef=5.0, kl_estimator=estimator)
        yield f"kl_{estimator}", Case(kl)
        if estimator in ("k1", "k3"):
            yield f"kl_{estimator}_by_ratio", Case(replace(kl, kl_by_ratio=True))
    taught = replace(ppo, kl_coef=0.0, teacher_coef=0.7)
    for mode in ("advantage", "reverse_kl", "forward_kl", "jsd"):
        yield f"teacher_{mode}", Case(replace(taught, teacher_mode=mode))
    # beside the KL to a reference of whole distributions, on the teacher's term alone
    both = replace(taught, rl_coef=0.0, kl_coef=0.3, kl_estimator="full", teacher_mode="jsd")
    yield "teacher_and_reference", Case(both)
    yield "teacher_alone", Case(replace(both, kl_coef=0.0, kl_estimator=None))


def other_cases():
    yield "supervised", Case(SupervisedUpdate())
    for name in preference_losses.names():
        options = options_of(preference_losses, name)
        yield (
            name,
            Case(PreferenceUpdate(name, options, beta=0.3, nll_coef=0.0 if name == "kto" else 0.2)),
        )
    for kind in ("sigmoid", "logexp"):
        yield f"pair_{kind}", Case(PairRewardUpdate(kind, margin=True))


CASES = dict([*policy_cases(), *other_cases()])


LEAVING_OUT = [
    name
    for name, case in CASES.items()
    if isinstance(case.update, (PolicyUpdate, ValueUpdate))
    and ("-" not in name or name.startswith("ppo") or name.endswith("token-mean"))
]


def build_models(checkpoint: Path) -> dict[str, CausalLM | ValueModel | RewardModel]:
    """{column: model}, fp64."""
    g = torch.Generator().manual_seed(5)
    how = {"dtype": torch.float64, "attn_implementation": VARLEN}
    backbone = AutoModel.from_pretrained(checkpoint, **how)
    weight = torch.randn(1, backbone.config.hidden_size, generator=g, dtype=torch.float64)
    head = Head("score", weight)
    policy = CausalLM(
        AutoModelForCausalLM.from_pretrained(checkpoint, **how), temperature=0.8, chunk_size=16
    )
    weights = OPTIONS["score_centering"].rollout_weights
    policy.hf.get_output_embeddings().rollout_weights = weights
    return {
        "logprobs": policy.eval(),
        "values": ValueModel(backbone, head).eval(),
        "rewards": RewardModel(backbone, head).eval(),
    }


@torch.no_grad()
def whole_batch(models, checkpoint: Path) -> ExperienceBatch:
    """Two turns in some rows, a row that trains nothing, weights of rows and tokens, and an old
    policy near enough that some tokens are clipped and some are not."""
    batch = alike(ragged_batch(LENGTHS), GROUPS, BEGINNINGS)
    mask = batch.loss_mask.clone()
    mask[:, 5:7] = False
    mask[3] = False
    ids, attention = batch.token_ids, batch.attention_mask
    g = torch.Generator().manual_seed(1)
    other = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    for parameter in other.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    reference = CausalLM(other, temperature=0.8, chunk_size=16).eval()
    reference.hf.get_output_embeddings().top_k = {"reference": 4, "teacher": 3}
    ref_logprobs, distributions = reference(ids, attention, None, None, ("reference", "teacher"))
    own = models["logprobs"](ids, attention)[0]
    return batch.replace(
        loss_mask=mask,
        turn_ids=turn_ids(mask),
        observed=mark_observed(batch.replace(loss_mask=mask)).observed,
        rollout_logprobs=own + 0.3 * batch.advantages,
        old_logprobs=own + 0.3 * batch.returns,
        values=models["values"](ids, attention)[0] + 0.3 * batch.values,
        ref_logprobs=ref_logprobs,
        teacher_logprobs=ref_logprobs,
        kl_weights=torch.rand(len(batch), generator=torch.Generator().manual_seed(9)),
        teacher_weights=torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 1.0, 0.0]),
        loss_weights=torch.rand(len(batch), generator=g),
        is_weights=torch.rand(mask.shape, generator=g),
        rollout_ids=distributions["teacher_ids"],
        rollout_support=distributions["teacher_support"],
        **distributions,
    )


def batch_of(case: Case, batch: ExperienceBatch) -> TokenBatch:
    """What the case trains on: the batch with the tokens marked that its loss selects, or answers
    made of its rows."""
    if isinstance(case.update, (PreferenceUpdate, PairRewardUpdate)):
        return answers(
            batch.select([*range(7), 6, 4, 2, 0, 5, 3, 1] if case.pairs else list(range(7)))
        )
    batch = batch.replace(**dict.fromkeys(case.without), kept=sets_of(batch) if case.cut else None)
    if not isinstance(case.update, PolicyUpdate):
        return batch
    loss = policy_losses[case.update.loss_type].component
    return select_tokens(batch, loss, case.update.options, torch.Generator().manual_seed(2))


def sets_of(batch: ExperienceBatch) -> list[KeptSets | None]:
    """Sets of up to five tokens, the sampled one among them. Every fifth token was drawn from the
    whole vocabulary, as were all of the second row."""
    rows = zip(batch.token_ids.tolist(), batch.lengths.tolist(), strict=True)
    found: list[KeptSets | None] = [
        KeptSets.of(
            sorted({ids[t], *((7 * t + 11 * k) % 66 for k in range(t % 5))}) if t % 5 else []
            for t in range(length)
        )
        for ids, length in rows
    ]
    return [found[0], None, *found[2:]]


def answers(batch: ExperienceBatch) -> PreferenceBatch:
    """Everything after the prompt is one answer; every second one is the worse."""
    mask = batch.attention_mask.clone()
    mask[:, :PROMPT] = False
    rows = torch.arange(len(batch))
    return PreferenceBatch(
        token_ids=batch.token_ids,
        attention_mask=batch.attention_mask,
        loss_mask=mask,
        trajectory_ids=batch.trajectory_ids,
        group_ids=batch.group_ids,
        passed=1.0 - rows % 2,
        ref_answers=-9.0 + rows / 2,
        margins=rows / 10,
        kl=torch.full((len(batch),), 0.1),
    )


def flat(batch: ExperienceBatch) -> ExperienceBatch:
    """The batch with rows that have no advantage, a group and one more, and one without a
    weight."""
    advantages, weights = batch.advantages.clone(), batch.loss_weights.clone()
    advantages[:3] = advantages[5] = weights[6] = 0
    return batch.replace(advantages=advantages, loss_weights=weights)


def gradients(
    case: Case, model, batch: ExperienceBatch, ranks: int, rank: int, leave_out: bool = False
) -> Tensor:
    """(cuts, parameters + 1): gradient and loss of each cut, summed over this rank's micro-batches
    and averaged over ranks. ``leave_out``: rows without a gradient are not computed."""
    batch = batch_of(case, batch)
    computed = case.update.gradient_rows(batch) if leave_out else None
    found = []
    for count, size, (model.packing, model.shares) in CUTS[ranks]:
        cost = replace(BY_COST, shared=model.shares)
        if case.pairs:
            plan = plan_pairs(batch, ranks, size, cost)
        else:
            plan = plan_steps(batch, ranks, len(batch), size, cost=cost, computed=computed)
        sizes = RowSizes.of(batch, cost)
        assert (sizes.tokens(range(len(batch))) < sum(sizes.lengths)) == model.shares
        shard, own = batch.select(plan.shards[rank]), plan.steps[0][rank]
        assert leave_out or count in (None, len(own.micro_batches))
        model.zero_grad()
        total = torch.zeros(1, dtype=torch.float64)
        for rows in own.micro_batches:
            loss, _ = case.update(partial(run, model), shard.select(rows), own.counts)
            loss.backward()
            total += loss.detach()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append(torch.cat([*(grad.flatten() for grad in grads), total]))
    result = torch.stack(found)
    if ranks > 1:
        dist.all_reduce(result)
    return result / ranks


def run(model, micro: ExperienceBatch, *outputs: str) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = (micro.token_ids, micro.attention_mask, micro.group_ids, micro.loss_mask)
    sets = micro.kept if isinstance(micro, ExperienceBatch) else None
    kept = sets and KeptIds.of(sets, micro.token_ids.shape[1], micro.token_ids.device)
    if outputs:
        asked = {COMPARISONS[name][0] for name in outputs if name in COMPARISONS}
        compared = {other: micro.distributions(other) for other in asked}
        return model(*tokens, outputs, compared, origins=Origins(kept))
    return model(*tokens, origins=Origins(kept))


def rank_of_two(rank, port, checkpoint, batch, path):
    init_distributed(rank, 2, "127.0.0.1", port, "cpu", timeout=PATIENCE)
    models = build_models(checkpoint)
    found = {
        name: gradients(case, models[case.model], batch, 2, rank) for name, case in CASES.items()
    }
    found |= {
        f"flat {name}": gradients(case, models[case.model], flat(batch), 2, rank, True)
        for name, case in CASES.items()
        if name in LEAVING_OUT
    }
    if rank == 0:
        torch.save(found, path)
    close_distributed()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """(checkpoint, batch, {case: gradients of the cuts on one rank})"""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    # The norms of most other architectures compute in fp32.
    checkpoint = tiny_model_dir(tmp_path_factory.mktemp("m"), arch="starcoder2", **shape)
    models = build_models(checkpoint)
    batch = whole_batch(models, checkpoint)
    return (
        checkpoint,
        batch,
        {n: gradients(c, models[c.model], batch, 1, 0) for n, c in CASES.items()},
    )


@pytest.fixture(scope="module")
def two_ranks(one_rank, tmp_path_factory):
    checkpoint, batch, _ = one_rank
    path = tmp_path_factory.mktemp("ranks") / "gradients.pt"
    on_ranks(2, rank_of_two, checkpoint, batch, path)
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def models(one_rank):
    return build_models(one_rank[0])


@pytest.mark.parametrize("case", CASES)
def test_one_rank(one_rank, case):
    found = one_rank[2][case]
    assert_same_gradient(found[1:], found[0])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(one_rank, two_ranks, case):
    assert_same_gradient(two_ranks[case], one_rank[2][case][0])


@pytest.mark.full
@pytest.mark.parametrize("case", LEAVING_OUT)
def test_rows_without_a_gradient_are_left_out(one_rank, two_ranks, models, case):
    """Of every cut on one rank and on two the gradient and the loss are those of all rows."""
    batch, update, model = flat(one_rank[1]), CASES[case].update, models[CASES[case].model]
    all_rows = gradients(CASES[case], model, batch, 1, 0)[0]
    own = gradients(CASES[case], model, batch, 1, 0, leave_out=True)
    left_out = int((~update.gradient_rows(batch_of(CASES[case], batch))).sum())
    assert left_out == (6 if case.startswith(("ppo", "gspo", "gpg")) else left_out) > 0
    assert_same_gradient(torch.cat([own, two_ranks[f"flat {case}"]]), all_rows)


@pytest.mark.parametrize("kind", ["tis", "icepop"])
@pytest.mark.parametrize("level", ["token", "segment", "geometric", "sequence"])
def test_weights_of_the_update_are_those_of_a_pass_before_it(one_rank, models, level, kind):
    """One step's gradient, padded and packed, in any number of micro-batches, and without the rows
    that have no gradient: two have no advantage, one no token."""
    model, flags, batch = models["logprobs"], correction(level, kind), one_rank[1]
    with torch.no_grad():
        old = model(batch.token_ids, batch.attention_mask)[0]
    some = batch.advantages * (torch.arange(len(batch)) > 1)[:, None]
    batch = batch.replace(old_logprobs=old, advantages=some)
    corrected, figures = correct_rollouts(batch, flags)
    assert 0 < figures["is_ratio_low"] < 1 > figures["is_ratio_high"] > 0
    before = PolicyUpdate("ppo", PPOOptions(), "seq-mean-token-mean")
    expected = gradients(Case(before), model, corrected, 1, 0)[0]
    own = Case(replace(before, correction=flags), without=("old_logprobs", "is_weights"))
    for leave_out in (False, True):
        assert_same_gradient(gradients(own, model, batch, 1, 0, leave_out), expected)


def run_on_all(model, micro: ExperienceBatch, *outputs: str) -> tuple[Tensor, dict[str, Tensor]]:
    """As ``run``, with every token scored."""
    every = micro.attention_mask.clone()
    every[:, 0] = False
    return run(model, micro.replace(loss_mask=every), *outputs)


@pytest.mark.parametrize("how", [PADDED, PACKED, SHARED])
@pytest.mark.parametrize("case", ["every_term-token-mean", "kl_full", "values-token-mean"])
def test_only_trained_tokens_are_scored(one_rank, models, case, how):
    """Gradient and loss are those of scoring every token, and the head sees no other state than
    those that predict a trained one."""
    case, batch = CASES[case], batch_of(CASES[case], one_rank[1])
    model, seen = models[case.model], []
    head = model.head if case.model == "values" else model.hf.get_output_embeddings()
    counting = head.register_forward_pre_hook(
        lambda module, args: seen.append(int(args[2].sum()) if len(args) > 1 else len(args[0]))
    )
    model.packing, model.shares = how
    counts = plan_steps(batch, 1, len(batch), 7).steps[0][0].counts
    found = []
    for of_tokens in (run_on_all, run):
        model.zero_grad()
        loss, _ = case.update(partial(of_tokens, model), batch, counts)
        loss.backward()
        found.append(
            torch.cat([*(p.grad.flatten() for p in model.parameters()), loss.detach()[None]])
        )
    counting.remove()
    assert_same_gradient(found[1][None], found[0])
    assert seen[1] <= counts.tokens < seen[0] and (how == SHARED or seen[1] == counts.tokens)


def is_by_token(case: Case) -> bool:
    """Whether a row is nothing to the loss: its sequences are trajectories, and what others wrote is
    context to it."""
    if getattr(case.update, "observation_coef", 0):
        return False
    loss = getattr(case.update, "loss_type", None)
    of_rows = {"sequence_mean", "token_sum"}
    whole_rows = loss is not None and not of_rows.isdisjoint(policy_losses[loss].needs)
    return isinstance(case.update, (PolicyUpdate, ValueUpdate)) and not whole_rows


def of_segments(update, model, batch: ExperienceBatch) -> Tensor:
    """(cuts, parameters + 1): gradient and loss, padded and packed, in one micro-batch and two."""
    found = []
    for (model.packing, model.shares), micros in product((PADDED, PACKED), (1, 2)):
        plan = plan_steps(batch, 1, len(batch), -(-len(batch) // micros))
        own, shard = plan.steps[0][0], batch.select(plan.shards[0])
        assert len(own.micro_batches) == micros
        model.zero_grad()
        total = torch.zeros(1, dtype=torch.float64)
        for rows in own.micro_batches:
            loss, _ = update(partial(run, model), shard.select(rows), own.counts)
            loss.backward()
            total += loss.detach()
        found.append(torch.cat([*(p.grad.flatten() for p in model.parameters()), total]))
    return torch.stack(found)


@pytest.mark.full
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if is_by_token(case)])
def test_a_trajectory_in_two_rows(one_rank, case):
    """The context up to a hole, and the whole one, trained after the hole."""
    checkpoint, batch, found = one_rank
    case, expected = CASES[case], found[case][0]
    parts, source = in_segments(batch_of(case, batch), 2, by_turns=True)
    assert len(source) > len(batch)
    assert_same_gradient(
        of_segments(case.update, build_models(checkpoint)[case.model], parts), expected
    )


@pytest.mark.parametrize("name", [n for n in advantage_estimators.names() if n != "gigpo"])
def test_credit_of_a_trajectory_in_two_rows(one_rank, name):
    """Every estimator; GiGPO compares rows, which are its steps."""
    checkpoint, batch, _ = one_rank
    model, g = build_models(checkpoint)["logprobs"], torch.Generator().manual_seed(4)
    batch = batch.replace(
        group_ids=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        rewards=torch.randn(len(batch), generator=g, dtype=torch.float64),
        agents=["solver", "solver", "critic", "critic", "solver", "critic", "solver"],
        episodes=torch.tensor([0, 0, 0, 1, 0, 0, 0]),
        squares=torch.rand(batch.loss_mask.shape, generator=g, dtype=torch.float64),
        greedy_rewards=torch.zeros(len(batch), dtype=torch.float64),
        reward_parts={"a": torch.randn(len(batch), generator=g, dtype=torch.float64)},
        trajectory_tokens=None,
    )
    update = CASES["ppo-seq-mean-token-mean"].update
    done = [
        credit(rows, name, kl_coef=0.1) for rows in (batch, in_segments(batch, 2, by_turns=True)[0])
    ]
    expected, found = (of_segments(update, model, rows) for rows in done)
    assert len(done[1]) > len(done[0])
    assert_same_gradient(torch.cat([expected, found]), expected[0])


@pytest.mark.parametrize(
    "name",
    [n for n in policy_losses.names() if isinstance(policy_losses[n].component, SelectingLoss)],
)
def test_some_tokens_are_marked_and_some_are_not(one_rank, name):
    batch = batch_of(CASES[name], one_rank[1])
    assert 0 < batch.selected.sum() < batch.loss_mask.sum()
