"""The gradient of a step does not depend on its cut into micro-batches: fp64, no engine, no processes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.algorithms.policy_losses import PPOOptions
from openrl.models.causal_lm import CausalLM
from openrl.training.updates import PolicyUpdate, SupervisedUpdate, ValueUpdate
from tests.experience import counts_of, ragged_batch
from tests.tiny import tiny_model_dir

CUTS = [
    [[0, 1, 2, 3, 4, 5, 6, 7]],
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[7], [5, 2, -1], [0, 1, 3, 4], [6], [-1]],
]
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
UPDATES = [PolicyUpdate("ppo", PPOOptions(), mode, 9.0, kl_coef=0.3, kl_estimator="k3") for mode in MODES]
TERMS = {"kl_coef": 0.3, "kl_estimator": "k3+", "entropy_coef": 0.2, "sft_coef": 0.4, "rl_coef": 0.7}
UPDATES += [PolicyUpdate("ppo", PPOOptions(), mode, 9.0, **TERMS) for mode in MODES]
UPDATES += [
    PolicyUpdate(
        "ppo", PPOOptions(), "seq-mean-token-mean", rl_coef=0.0, **{"entropy_coef": 0.0, "sft_coef": 0.0} | term
    )
    for term in ({"entropy_coef": -0.2}, {"sft_coef": 0.4, "sft_threshold": -0.5})
]
UPDATES += [ValueUpdate(0.2, mode, 9.0) for mode in MODES]
UPDATES += [SupervisedUpdate()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    hf = AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path_factory.mktemp("m")), dtype=torch.float64)
    return CausalLM(hf, temperature=0.8, chunk_size=5).eval()


@pytest.mark.parametrize("update", UPDATES, ids=lambda u: f"{type(u).__name__}-{getattr(u, 'agg_mode', '')}")
def test_any_cut_gives_the_same_gradient(model, update):
    batch = ragged_batch()
    with torch.no_grad():  # an old policy near enough that some tokens are clipped and some are not
        old = model(batch.token_ids, batch.attention_mask)[0] + 0.3 * batch.returns
    g = torch.Generator().manual_seed(1)
    weights = {"loss_weights": torch.rand(len(batch), generator=g), "is_weights": torch.rand(old.shape, generator=g)}
    batch = batch.replace(old_logprobs=old, **weights)

    def forward(micro, *want):
        return model(micro.token_ids, micro.attention_mask, want)

    results = []
    for cut in CUTS:
        model.zero_grad()
        parts = []
        for rows in cut:
            loss, metrics = update(forward, batch.select(rows), counts_of(batch))
            loss.backward()
            parts.append((float(loss.detach()), metrics))
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((sum(loss for loss, _ in parts), gradient))
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-9)
        assert float((gradient - results[0][1]).norm() / results[0][1].norm()) < 1e-9
