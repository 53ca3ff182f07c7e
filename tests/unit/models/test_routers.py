"""Replayed routes: the experts are the given ones, everything else is the model's own."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from openrl.algorithms.routes import with_shared_routes
from openrl.errors import UserError
from openrl.models.attention import VARLEN
from openrl.models.causal_lm import CausalLM
from openrl.models.checkpointing import recompute
from openrl.models.headed import Origins
from openrl.models.routers import Routers, check_routers
from openrl.token_origins import Routes
from tests.experience import alike, ragged_batch

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 66,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
GROUPED = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
LATENT = {
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "granitemoe": {"num_local_experts": 8},
    "deepseek_v2": {"n_routed_experts": 8, "topk_method": "greedy", **LATENT},
    "deepseek_v3": GROUPED | LATENT,
    "glm4_moe": GROUPED,
    "minimax_m2": {"num_local_experts": 8},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1},
}


def tiny(family: str, dtype: torch.dtype = torch.float64, **more: object):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL | FAMILIES[family] | more)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # in fp64 too
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **eager).eval()


def others(chosen: Tensor) -> Tensor:
    """Experts that differ from (N, routers, k) ``chosen`` ones, of eight."""
    return (chosen + torch.arange(1, chosen.shape[0] + 1)[:, None, None]) % 8


@pytest.mark.parametrize("family", FAMILIES)
def test_own_experts_give_the_same_bits_and_others_are_obeyed(family):
    model = tiny(family)
    routers, ids = Routers(model), torch.arange(4, 16)[None]
    with routers.recording() as chosen:
        plain = model(ids).logits
    own = torch.stack(chosen, 1)
    layers = 3 if family not in ("deepseek_v3", "glm4_moe", "ernie4_5_moe") else 2
    assert own.shape == (12, layers, 2) and routers.width == 2 * layers
    with torch.no_grad(), routers.replaying(own.view(1, 12, -1).to(torch.int16)):
        assert torch.equal(model(ids).logits, plain)
    different = routers.replaying(others(own).view(1, 12, -1))
    with torch.no_grad(), different, routers.recording() as obeyed:
        assert not torch.allclose(model(ids).logits, plain)
    assert torch.equal(torch.stack(obeyed, 1), others(own))
    partly = others(own).view(1, 12, -1).clone()
    partly[:, 3:] = Routes.UNKNOWN
    partly[:, 5:] = Routes.LOST
    with torch.no_grad(), routers.replaying(partly), routers.recording() as found:
        model(ids)
    assert torch.equal(found[0][3:], own[3:, 0]) and torch.equal(found[0][:3], others(own)[:3, 0])


WEIGHTS = {
    # each as its paper or config says, from the logits (n, 8) and the experts (n, 2)
    "qwen3_moe": lambda z, e: (p := z.softmax(-1).gather(1, e)) / p.sum(-1, keepdim=True),
    "olmoe": lambda z, e: z.softmax(-1).gather(1, e),
    "mixtral": lambda z, e: z.gather(1, e).softmax(-1),
    "gpt_oss": lambda z, e: z.gather(1, e).softmax(-1),
    "deepseek_v3": lambda z, e: 2.5 * (s := z.sigmoid().gather(1, e)) / s.sum(-1, keepdim=True),
}


@pytest.mark.parametrize("family", WEIGHTS)
def test_a_router_weighs_given_experts_by_its_familys_formula(family):
    """Weights and the gradient of the router's matrix, against the formula in fp64."""
    model = tiny(family, torch.float64)
    routers = Routers(model)
    router = next(
        m
        for n, m in model.named_modules()
        if n.endswith(("gate", "router")) and hasattr(m, "top_k")
    )
    states = torch.randn(8, 32, dtype=torch.float64)
    given = torch.stack([torch.arange(8), (torch.arange(8) * 3 + 1) % 8], 1)
    given[:, 1] = torch.where(given[:, 1] == given[:, 0], (given[:, 0] + 1) % 8, given[:, 1])
    factors = torch.randn(8, 2, dtype=torch.float64)
    with routers.replaying(given.repeat(1, len(routers.layers))[None]):
        _, weights, experts = router(states)
    assert torch.equal(experts, given)
    matrix = router.weight.detach().clone().requires_grad_()
    bias = router.bias.detach() if getattr(router, "bias", None) is not None else 0
    expected = WEIGHTS[family](states @ matrix.T + bias, given)
    # softmax in fp32 inside some routers
    assert torch.allclose(weights.double(), expected, atol=1e-6)
    (weights.double() * factors).sum().backward()
    (expected * factors).sum().backward()
    assert torch.allclose(router.weight.grad, matrix.grad, atol=1e-5)
    assert matrix.grad.abs().max() > 0.1


def test_refusals(tmp_path):
    def refused(family: str, **fields: object) -> str:
        config = AutoConfig.for_model(family, **SMALL | fields)
        config.save_pretrained(tmp_path / family)
        with pytest.raises(UserError) as error:
            check_routers(str(tmp_path / family), False, {})
        return str(error.value)

    assert "a qwen3 has no experts" in refused("qwen3")
    assert "outside of a module" in refused("jamba", num_experts=8)
    assert "PhimoeTopKRouter" in refused("phimoe", num_local_experts=8)
    # its weights are 0 in groups that it did not choose
    grouped = {**GROUPED, **LATENT, "topk_method": "group_limited_greedy"}
    assert "DeepseekV2TopkRouter" in refused("deepseek_v2", **grouped)
    AutoConfig.for_model("qwen3_moe", **SMALL | FAMILIES["qwen3_moe"]).save_pretrained(
        tmp_path / "fits"
    )
    assert check_routers(str(tmp_path / "fits"), False, {}).width == 6
    changed = {"num_experts_per_tok": 4}
    assert check_routers(str(tmp_path / "fits"), False, changed).width == 12


@pytest.mark.parametrize("gradients", [True, False])
def test_a_pass_that_fails_leaves_no_experts_behind(gradients):
    model = tiny("qwen3_moe")
    routers, ids = Routers(model), torch.arange(4, 16)[None]
    with torch.no_grad():
        plain = model(ids).logits
    different = torch.tensor([6, 7]).repeat(3).expand(1, 12, -1)
    with (
        pytest.raises(MemoryError),
        torch.set_grad_enabled(gradients),
        routers.replaying(different),
    ):
        assert not torch.allclose(model(ids).logits, plain)
        raise MemoryError
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain)


# -- the gradient of a batch -----------------------------------------------------------------------

LENGTHS, GROUPS = (12, 7, 9, 5), (0, 0, 1, 1)


@pytest.fixture(scope="module")
def batch():
    """Rows of which each pair begins alike, with random experts, some unknown."""
    found = alike(ragged_batch(LENGTHS), GROUPS, (5, 3))
    torch.manual_seed(1)
    ids = torch.stack([torch.stack([torch.randperm(8)[:2] for _ in range(3)]) for _ in range(48)])
    rows = ids.view(4, 12, 6).to(torch.int16)
    rows[0, 7] = Routes.UNKNOWN
    routes = [
        Routes(6, array("h", row[:n].flatten().tolist()))
        for row, n in zip(rows, LENGTHS, strict=True)
    ]
    return with_shared_routes(found.replace(routes=routes))[0]


def trained(
    batch, pieces: list[list[int]], packing=False, shares=False, method=None, reentrant=False
):
    """Log-probs (4, 12) and the gradient of a weighted sum of them."""
    hf = tiny("qwen3_moe")
    hf.set_attn_implementation(VARLEN if packing else "eager")
    model = CausalLM(hf, 1.0, 0, packing)
    model.shares, model.routers = shares, Routers(hf)
    if method:
        recompute(hf, method, reentrant=reentrant)
        model.train()
    logprobs = torch.zeros(4, 12, dtype=torch.float64)
    for piece in pieces:
        rows = batch.select(piece)
        routes = model.routers.rows(rows.routes, rows.token_ids.shape[1], torch.device("cpu"))
        tokens = (rows.token_ids, rows.attention_mask, rows.group_ids, rows.loss_mask)
        found, _ = model(*tokens, origins=Origins(routes=routes))
        with torch.no_grad():  # another pass before the backward pass, with the model's own choice
            model(*tokens)
        (found * rows.advantages * rows.loss_mask).sum().backward()
        logprobs[piece, : found.shape[1]] = found.detach().double()
    return logprobs, torch.cat([p.grad.flatten() for p in hf.parameters()])


@pytest.fixture(scope="module")
def whole(batch):
    return trained(batch, [[0, 1, 2, 3]])


@pytest.mark.parametrize(
    "how",
    [
        {"pieces": [[0], [1], [2], [3]]},
        {"pieces": [[3, 0], [2, 1]]},
        {"pieces": [[0, 1, 2, 3]], "packing": True},
        {"pieces": [[0, 1, 2, 3]], "packing": True, "shares": True},
        {"pieces": [[0, 1], [2, 3]], "packing": True, "shares": True},
        {"pieces": [[0, 1], [2, 3]], "method": "uniform"},
        {"pieces": [[0, 1], [2, 3]], "method": "uniform", "reentrant": True},
        {"pieces": [[0, 1], [2, 3]], "method": "moe"},
    ],
    ids=str,
)
def test_one_gradient_however_it_is_computed(batch, whole, how):
    logprobs, gradient = trained(batch, **how)
    assert torch.allclose(logprobs, whole[0], atol=1e-6)
    assert torch.allclose(gradient, whole[1], atol=1e-5 * float(whole[1].abs().max()))


def test_without_the_routes_it_is_another_gradient(batch, whole):
    unknown = [Routes(6).first(len(r)) for r in batch.routes]
    logprobs, gradient = trained(batch.replace(routes=unknown), [[0, 1, 2, 3]])
    assert (logprobs - whole[0]).abs().max() > 0.1
    assert (gradient - whole[1]).abs().max() > 0.01 * float(whole[1].abs().max())


def test_the_gradient_is_that_of_an_obvious_model():
    """A model written out with fixed experts, in fp64: one block of experts over embeddings."""
    hf = tiny("qwen3_moe", num_hidden_layers=1)
    block, routers = hf.model.layers[0].mlp, Routers(hf)
    states = torch.randn(1, 6, 32, dtype=torch.float64)
    given = torch.tensor([[0, 1], [7, 2], [3, 4], [5, 6], [1, 0], [2, 7]])
    with routers.replaying(given[None]):
        block(states).square().sum().backward()
    found = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    total = 0
    for token, pair in zip(states[0], given.tolist(), strict=True):
        chances = (block.gate.weight @ token).softmax(-1)
        parts = []
        for expert in pair:
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            answer = block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            parts.append(chances[expert] / chances[pair].sum() * answer)
        total = total + torch.stack(parts).sum(0).square().sum()
    total.backward()
    for name, p in block.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=1e-4, atol=1e-5), name
    assert found["gate.weight"].abs().max() > 0.01


# -- what travels ----------------------------------------------------------------------------------


def test_siblings_take_the_routes_of_the_first_with_their_beginning():
    """Three rows: the third agrees with the first on two tokens and with the second on four."""
    batch = ragged_batch((6, 6, 6))
    ids = torch.tensor([[5, 6, 9, 9, 9, 9], [5, 6, 7, 8, 4, 4], [5, 6, 7, 8, 5, 5]])
    routes = [Routes(1, array("h", [10 * n + t for t in range(5)] + [-1])) for n in range(3)]
    routes[2].ids[:2] = array("h", [0, 21])
    batch = batch.replace(token_ids=ids, group_ids=torch.zeros(3, dtype=torch.long), routes=routes)
    found, metrics = with_shared_routes(batch)
    assert [[*r.ids] for r in found.routes] == [
        [0, 1, 2, 3, 4, -1],
        [0, 1, 12, 13, 14, -1],
        [0, 1, 12, 13, 24, -1],
    ]
    # the last token is never computed; 2 of the second row and 3 of the third one differed
    assert (metrics["routes_unknown"].value, metrics["routes_differ"].value) == (0, 5 / 6)
    lacking = batch.replace(routes=[routes[0], None, Routes(1, array("h", [1, -1, 1, 1, 1, -1]))])
    assert with_shared_routes(lacking)[1]["routes_unknown"].value == 5 / 15


def test_rows_of_other_groups_between_siblings_and_experts_that_are_lost():
    """Groups in turn. The first row of group 0 lost its first two tokens, so its sibling has none
    there either, which is unknown in both and differs in neither."""
    batch = ragged_batch((4, 4, 4, 4))
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 4, 8]])
    routes = [
        Routes(2, array("h", numbers))
        for numbers in (
            [-2, -2, -2, -2, 1, 2, -1, -1],
            [3, 4, 3, 4, 3, 4, -1, -1],
            [5, 6, 5, 6, 5, 6, -1, -1],
            [7, 8, 3, 4, 7, 8, -1, -1],
        )
    ]
    groups = torch.tensor([0, 3, 0, 3])
    batch = batch.replace(token_ids=ids, group_ids=groups, routes=routes)
    found, metrics = with_shared_routes(batch)
    assert [[*r.ids] for r in found.routes] == [
        [-2, -2, -2, -2, 1, 2, -1, -1],
        [3, 4, 3, 4, 3, 4, -1, -1],
        [-2, -2, -2, -2, 1, 2, -1, -1],
        [3, 4, 3, 4, 7, 8, -1, -1],
    ]
    assert metrics["routes_unknown"].value == 4 / 12
    # 5 tokens are shared; the third of row 2 and the first of row 3 had other experts
    assert metrics["routes_differ"].value == 2 / 5
    assert [*routes[2].ids][:2] == [5, 6]  # rows of the rollout stay as they were
