"""Learning rates of every schedule by hand, which parameters decay, and the steps of every
optimizer."""

import ctypes
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from openrl.config.groups.optimizer import OptimizerFlags, Scheduler
from openrl.errors import UserError
from openrl.training_engine.optimizers import (
    BF16AdamW,
    OptimSpec,
    build_optimizer,
    build_scheduler,
    check_shard,
)


def spec(**changes):
    flags = OptimizerFlags(**({"lr_warmup_ratio": 0.1, "l2": 0.5} | changes))
    return OptimSpec(1.0, flags, total_steps=20)


def rates(scheduler: str, **changes) -> list[float]:
    """The learning rate of each of 20 optimizer steps, and the one after."""
    s = spec(lr_scheduler=scheduler, **changes)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), s)
    schedule = build_scheduler(optimizer, s)
    found = []
    for _ in range(21):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("scheduler", get_args(Scheduler))
def test_every_schedule_runs_and_peaks_at_the_flag(scheduler):
    found = rates(scheduler)
    assert max(found) == pytest.approx(1.0)
    assert all(0 <= rate <= 1 for rate in found)


def test_cosine_with_min_lr_by_hand():
    found = rates("cosine_with_min_lr", min_lr_ratio=0.2)
    expected = [0.0, 0.5] + [0.2 + 0.8 * (1 + math.cos(math.pi * k / 18)) / 2 for k in range(19)]
    assert found == pytest.approx(expected)


def test_warmup_in_steps_takes_the_place_of_the_ratio():
    assert rates("constant_with_warmup", lr_warmup_steps=4)[:6] == pytest.approx(
        [0, 0.25, 0.5, 0.75, 1, 1]
    )
    assert rates("constant_with_warmup", lr_warmup_steps=0)[0] == pytest.approx(1)


def test_linear_ends_at_zero_and_wsd_at_its_floor():
    assert rates("linear")[-1] == pytest.approx(0.0)
    warmup_stable_decay = rates("warmup_stable_decay", min_lr_ratio=0.2)
    assert warmup_stable_decay[2:19] == pytest.approx([1.0] * 17)
    assert warmup_stable_decay[-1] == pytest.approx(0.2)


def test_decay_spares_biases_and_norms():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    decay = {
        id(p): g["weight_decay"]
        for g in build_optimizer(model, spec()).param_groups
        for p in g["params"]
    }
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.5,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }


class Small(torch.nn.Module):
    """An embedding, one layer with a matrix and a norm, a head."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 64)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))]
        )
        self.head = torch.nn.Linear(64, 8, bias=False)

    def forward(self, ids):
        return self.head(self.layers[0](self.embed(ids)))


def trained(make_optimizers, steps=5, dtype=torch.float32):
    """Parameters after some steps on one batch, with the optimizers that the callable gives."""
    torch.manual_seed(0)
    model = Small().to(dtype)
    optimizers = make_optimizers(model)
    ids = torch.arange(8)
    for _ in range(steps):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(ids).float(), ids.flip(0)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return dict(model.named_parameters())


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest():
    s = replace(spec(optimizer="muon"), learning_rate=1e-2)

    def by_hand(model):
        matrices = [model.layers[0][0].weight]
        others = [p for p in model.parameters() if p is not matrices[0]]
        groups = [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
        ]
        muon = torch.optim.Muon(
            matrices, lr=1e-2, weight_decay=0.5, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)]

    found, expected = trained(lambda m: [build_optimizer(m, s)]), trained(by_hand)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_muon_follows_parameters_that_are_swapped_in_its_groups():
    """As mixed precision does, which puts masters where the parameters were."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = build_optimizer(model, spec(optimizer="muon"))
    for group in optimizer.param_groups:
        group["params"] = [p.detach().clone().requires_grad_() for p in group["params"]]
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.clone() for p in masters]
    for p in masters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, masters, strict=True))
    assert optimizer.state.keys() == set(masters)


def test_the_scheduler_reaches_both_parts_of_muon():
    s = spec(optimizer="muon", lr_scheduler="constant_with_warmup", lr_warmup_steps=2)
    optimizer = build_optimizer(Small(), s)
    schedule = build_scheduler(optimizer, s)
    schedule.step()
    assert {group["lr"] for part in optimizer._parts for group in part.param_groups} == {0.5}


def test_8_bit_moments_stay_near_adamw():
    s = replace(spec(optimizer="adamw_8bit"), learning_rate=1e-3)
    start = trained(lambda m: [], steps=0)
    found, plain = (
        trained(lambda m, s=s: [build_optimizer(m, s)], 3)
        for s in (s, replace(s, flags=replace(s.flags, optimizer="adamw")))
    )
    moved = torch.cat([(plain[n] - start[n]).flatten() for n in plain])
    gap = torch.cat([(plain[n] - found[n]).flatten() for n in plain])
    # small tensors keep 32 bits, the layer's matrix has 8
    assert 0 < float(gap.norm() / moved.norm()) < 0.05


def drifted(optimizer, steps=200):
    """How far weights near 1 move while every gradient is about 1, at a learning rate below bf16's
    spacing there."""
    noise = torch.Generator().manual_seed(0)
    weight = optimizer.param_groups[0]["params"][0]
    start = weight.detach().double()
    for _ in range(steps):
        weight.grad = (1 + 0.1 * torch.randn(weight.shape, generator=noise)).to(weight.dtype)
        optimizer.step()
    lost = optimizer.state[weight].get("compensation", torch.zeros(()))
    return weight.detach().double() + lost.double() - start


def test_bf16_with_compensation_tracks_fp32_where_plain_bf16_stalls():
    """200 steps of 1e-4 are 0.02, several spacings of bf16 near 1 (2**-7); each step alone is
    rounded away."""
    starts = 1 + torch.rand(64, 64, generator=torch.Generator().manual_seed(1))
    weights = [
        torch.nn.Parameter(starts.bfloat16().to(dtype))
        for dtype in (torch.float32, *[torch.bfloat16] * 2)
    ]
    settings = {"lr": 1e-4, "betas": (0.9, 0.95)}
    exact = drifted(torch.optim.AdamW(weights[:1], **settings, weight_decay=0.0))
    compensated = drifted(BF16AdamW(weights[1:2], **settings))
    plain = drifted(torch.optim.AdamW(weights[2:], **settings, weight_decay=0.0))
    assert float(exact.mean()) == pytest.approx(-0.02, rel=0.01)
    assert float((compensated - exact).norm() / exact.norm()) < 0.02  # the moments are rounded, too
    assert not plain.any()


def test_bf16_adamw_is_the_same_in_chunks(monkeypatch):
    s = replace(spec(optimizer="adamw_bf16"), learning_rate=1e-3)
    whole = trained(lambda m: [build_optimizer(m, s)], dtype=torch.bfloat16)
    monkeypatch.setattr("openrl.training_engine.optimizers.CHUNK", 100)
    cut = trained(lambda m: [build_optimizer(m, s)], dtype=torch.bfloat16)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_kernels_that_count_in_32_bits_get_no_larger_tensor():
    """bitsandbytes passes the number of elements as ctypes.c_int32, which wraps without an
    error: of 8.2e9 parameters in two shards 4.1e9 become -2e8."""
    assert ctypes.c_int32(2**31 - 1).value == 2**31 - 1
    assert ctypes.c_int32(2**31).value < 0
    check_shard("adamw_8bit", 2**31 - 1, "cuda")
    for optimizer, device in (("adamw", "cuda"), ("adamw_8bit", "cpu")):
        check_shard(optimizer, 2**31, device)
    with pytest.raises(UserError, match="2,147,483,648 elements"):
        check_shard("adamw_8bit", 2**31, "cuda")
