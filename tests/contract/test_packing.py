"""Rows that are packed get the log-probs, values, rewards and gradients that each gets alone."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from openrl.algorithms.policy_losses import PPOOptions
from openrl.errors import UserError
from openrl.experience import StepPlan
from openrl.models.attention import varlen_attention
from openrl.training_engine.build import build_engine
from openrl.training_engine.updates import PolicyUpdate, ValueUpdate
from tests.contract.test_train_engine import plain_logprobs
from tests.experience import alike, column_of, counts_of, engine_spec, optim_spec, ragged_batch
from tests.marks import full_after
from tests.tiny import tiny_model_dir

ARCHITECTURES = {
    "qwen3": {},
    "llama": {},
    "qwen3_moe": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 32},  # every second layer slides
    "gpt2": {},  # learned positions
}
CUT = [[3, 0, -1, 6], [5, 1, 2], [-1], [7, 4]]


pytestmark = pytest.mark.usefixtures("one_rank")


def forgets_boundaries(module, query, key, value, attention_mask, **kwargs):
    """Causal attention over everything that stands in the row."""
    return sdpa_attention_forward(module, query, key, value, None, is_causal=True, **kwargs)


def forgets_beginnings(module, query, key, value, attention_mask, *, key_places=None, **kwargs):
    """Every row's own part sees itself alone."""
    kwargs["cu_seq_lens_k"] = kwargs.get("cu_seq_lens_q")
    return varlen_attention(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("forgets_beginnings", forgets_beginnings)
AttentionMaskInterface.register("forgets_beginnings", lambda *args, **kwargs: None)
AttentionInterface.register("forgets_boundaries", forgets_boundaries)
AttentionMaskInterface.register("forgets_boundaries", sdpa_mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager", None])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_log_probs_are_those_of_rows_alone(tmp_path, batch, arch, attention):
    path = tiny_model_dir(tmp_path, arch=arch, tied=False, **ARCHITECTURES[arch])
    engine = build_engine(
        engine_spec(path, temperature=0.7, chunk_size=5, attention=attention, packing=True)
    )
    found = column_of(engine, batch, CUT)
    torch.testing.assert_close(
        found, plain_logprobs(path, batch, 0.7, attention), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["values", "rewards"])
def test_scalars_are_those_of_padded_rows(tmp_path, checkpoint, batch, kind):
    # a reward model needs a stored head
    build_engine(engine_spec(checkpoint, "values")).export(tmp_path)
    columns = [
        column_of(build_engine(engine_spec(tmp_path, kind, packing=packing)), batch, CUT)
        for packing in (False, True)
    ]
    assert columns[0].abs().max() > 0.1
    torch.testing.assert_close(*columns, rtol=0, atol=1e-5)


# rows of CUT that follow each other and are of one group: 3 0, 5 (1) 2, 4 alone
SIBLINGS = (0, 0, 1, 0, 2, 1, 2, 1)
WITH_SIBLINGS = [[3, 0, 1, -1, 6, 4], [5, 2, 7], [-1]]


def with_beginnings(batch):
    """Three groups, of which the rows begin with four, three and six equal tokens."""
    return alike(batch, SIBLINGS, (4, 3, 6))


def count_tokens(engine):
    """A list that gets the tokens of every forward pass from here on."""
    computed = []
    embedding = engine.model.hf.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: computed.append(args[0].numel()))
    return computed


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES.keys() - {"gemma2"}))  # its logits are capped
def test_rows_that_share_their_beginning(tmp_path, batch, arch):
    """Also beyond a window, which is shorter than a beginning."""
    batch = with_beginnings(batch)
    path = tiny_model_dir(tmp_path, arch=arch, tied=False, **ARCHITECTURES[arch])
    engine = build_engine(engine_spec(path, temperature=0.7, chunk_size=5, shares=True))
    tokens = count_tokens(engine)
    found = column_of(engine, batch, WITH_SIBLINGS)
    torch.testing.assert_close(found, plain_logprobs(path, batch, 0.7, None), rtol=0, atol=1e-5)
    whole = [
        sum(max(int(batch.lengths[row]), 1) if row >= 0 else 1 for row in rows)
        for rows in WITH_SIBLINGS
    ]
    assert tokens[0] < whole[0] and tokens[1] < whole[1] and tokens[2] == 1


@pytest.mark.parametrize("kind", ["values", "rewards"])
def test_scalars_of_rows_that_share_their_beginning(tmp_path, checkpoint, batch, kind):
    build_engine(engine_spec(checkpoint, "values")).export(tmp_path)
    columns, tokens = [], []
    for shares in (False, True):
        engine = build_engine(engine_spec(tmp_path, kind, packing=True, shares=shares))
        computed = count_tokens(engine)
        columns.append(column_of(engine, with_beginnings(batch), WITH_SIBLINGS))
        tokens.append(sum(computed))
    torch.testing.assert_close(*columns, rtol=0, atol=1e-5)
    assert tokens[1] < tokens[0]


def test_attention_that_does_not_look_at_the_shared_beginning_is_refused(checkpoint, batch):
    """It takes the keys as they stand in the row: right for rows that share nothing."""
    with pytest.raises(
        UserError, match=r"--prefix_grouper: rows of .* cannot share their beginning"
    ):
        build_engine(engine_spec(checkpoint, attention="forgets_beginnings", shares=True))


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("gptj", "cannot load a model from .*leave --prefix_grouper out"),
        ("bloom", "--prefix_grouper: rows of .* cannot share their beginning"),
    ],
)
def test_architectures_without_such_attention_are_refused(tmp_path, arch, expected):
    path = tiny_model_dir(tmp_path, arch=arch, tied=False)
    with pytest.raises(UserError, match=rf"(?s){expected}"):
        build_engine(engine_spec(path, shares=True))


def test_capped_logits_are_refused(tmp_path):
    path = tiny_model_dir(tmp_path, arch="gemma2", query_pre_attn_scalar=32)
    with pytest.raises(UserError, match=r"--prefix_grouper: .* knows no capped logits"):
        build_engine(engine_spec(path, shares=True))


def ways_to_run():
    """(how rows run, gradient checkpointing)"""
    return [
        ({"packing": True}, False),
        ({"packing": True}, True),
        ({"shares": True}, False),
        ({"shares": True}, True),
    ]


@pytest.mark.parametrize("stage", full_after(1, [3, 0, 1, 2]))
@pytest.mark.parametrize("kind", ["logprobs", "values"])
def test_training_is_that_of_padded_rows(checkpoint, batch, kind, stage):
    """Two steps with an entropy term, with and without gradient checkpointing."""
    batch = with_beginnings(batch)
    ppo = PolicyUpdate("ppo", PPOOptions(), "seq-mean-token-mean", entropy_coef=0.1)
    update = ppo if kind == "logprobs" else ValueUpdate(0.0, "token-mean")
    plan = StepPlan(WITH_SIBLINGS, counts_of(batch))
    trained = []
    for rows, checkpointing in [({}, False), *ways_to_run()]:
        optim = optim_spec(learning_rate=1e-3)
        spec = engine_spec(
            checkpoint,
            kind,
            zero_stage=stage,
            optim=optim,
            gradient_checkpointing=checkpointing,
            **rows,
        )
        engine = build_engine(spec)
        reports = [engine.train_step(batch, plan, update) for _ in range(2)]
        weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
        trained.append(({name: metric.value for name, metric in reports[1].items()}, weights))
    for metrics, weights in trained[1:]:
        assert metrics == pytest.approx(trained[0][0], rel=1e-4, abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, trained[0][1][name], rtol=1e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize("kind", ["logprobs", "values", "rewards"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_that_crosses_rows_is_refused(tmp_path, checkpoint, kind, dtype):
    build_engine(engine_spec(checkpoint, "values")).export(tmp_path)
    path = checkpoint if kind == "logprobs" else tmp_path
    build_engine(engine_spec(path, kind, dtype=dtype, packing=True))
    with pytest.raises(UserError, match="attention crosses from one packed row into the next"):
        build_engine(
            engine_spec(path, kind, dtype=dtype, attention="forgets_boundaries", packing=True)
        )


def test_positions_that_are_ignored_are_refused(tmp_path):
    # ALiBi: distances are counted from the row's start
    path = tiny_model_dir(tmp_path, arch="bloom", tied=False)
    with pytest.raises(UserError, match="attention crosses"):
        build_engine(engine_spec(path, attention="eager", packing=True))


def test_attention_that_needs_a_gpu_is_left_alone_until_the_model_is_there(tmp_path, checkpoint):
    """The output head is tried while the model is on the CPU."""

    def never(*args, **kwargs):
        raise AssertionError("ran on a CPU")

    AttentionInterface.register("never_on_a_cpu", never)
    AttentionMaskInterface.register("never_on_a_cpu", sdpa_mask)
    engine = build_engine(engine_spec(checkpoint, attention="never_on_a_cpu"))
    assert engine.model.hf.config._attn_implementation == "never_on_a_cpu"
    with pytest.raises(AssertionError, match="ran on a CPU"):
        column_of(engine, ragged_batch(), [[0]])
