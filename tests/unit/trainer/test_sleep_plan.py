"""What --dry_run says of sleep: peaks by hand, and the table of a run's flags."""

import asyncio

import pytest
import torch

from openrl.cluster.planner import plan_placement, role_requests
from openrl.config.derived import leaders
from openrl.models.process_memory import MemoryUse, memory_use
from openrl.trainer.planning.dry_run import room_remarks
from openrl.trainer.planning.memory_estimate import Memory
from openrl.trainer.planning.sleep_estimate import (
    dropped_parts,
    lines_on_a_cpu,
    simulate_stages,
    stages,
)
from openrl.workers.profiling import MemoryLog, show
from openrl.workers.residency import ResidencyTable, RolePart
from openrl.workers.roles import sleep_parts
from tests.flags import GRPO, PPO, ppo

BOTH = "--colocate_all_models --device cpu --vllm_enable_sleep --deepspeed_enable_sleep"
ACTOR = Memory(weights=10, gradients=20, masters=20, moments=40, logits=3)
SIZES = {
    "vllm": Memory(weights=10, cache=50).by_part(),
    "actor": ACTOR.by_part(),
    "critic": ACTOR.by_part() | {"logits": 0},
    "reference": Memory(weights=10, logits=2).by_part(),
}


def table_of(words: str) -> tuple[ResidencyTable, list[tuple[str, str]]]:
    config = ppo(words)
    roles = [
        role for role in SIZES if role != "vllm" and (role != "critic" or "group_norm" not in words)
    ]
    plan = plan_placement(
        role_requests(config.placement, config.engine, roles, leaders(config)), "cpu", []
    )
    return ResidencyTable.of(plan, sleep_parts(config)), stages(config)


def peaks(words: str) -> dict[str, int]:
    return {
        found.stage: found.peak
        for found in simulate_stages(*table_of(words), SIZES, dropped_parts(ppo(words)))
    }


def test_peaks_of_one_place_by_hand():
    one_place = f"{GRPO} --colocate_all_models --device cpu"
    # engine, cache, actor with gradients and states, reference
    everything = 10 + 50 + 10 + 20 + 60 + 10
    assert peaks(f"{one_place} --vllm_enable_sleep") == {
        "publish": everything - 50 + 3,
        "collect": everything,
        "forward reference": everything - 60 + 2,
        "forward actor": everything - 60 + 3,
        "train actor": everything - 60 + 3,
    }
    assert peaks(f"{GRPO} {BOTH}") == {
        "publish": 10 + 10 + 10 + 3,
        "collect": 10 + 50 + 10 + 10,
        "forward reference": 10 + 10 + 2,
        "forward actor": 10 + 10 + 3,
        "train actor": 10 + 20 + 60 + 10 + 3,
    }
    whole = f"{GRPO} {BOTH} --deepspeed_sleep_states param optim grad --ref_reward_offload"
    assert peaks(whole) == {
        "publish": 10 + 10 + 3,
        "collect": 60,
        "forward reference": 12,
        "forward actor": 13,
        "train actor": 93,
    }


def test_a_stage_without_room_is_named():
    walked = simulate_stages(
        *table_of(f"{GRPO} {BOTH}"), SIZES, dropped_parts(ppo(f"{GRPO} {BOTH}"))
    )
    (remark,) = room_remarks(walked, 102)
    assert "a GPU has 102 B, and train actor takes 103 B" in remark and "--zero_stage 3" in remark
    assert room_remarks(walked, 103) == room_remarks(walked, None) == []


def test_what_sleeps_waits_on_the_host_unless_it_is_dropped():
    def waiting(words: str) -> dict[str, int]:
        return {
            found.stage: found.host
            for found in simulate_stages(*table_of(words), SIZES, dropped_parts(ppo(words)))
        }

    assert waiting(f"{GRPO} {BOTH}") == {
        "publish": 60, "collect": 60, "forward reference": 60 + 10, "forward actor": 60 + 10, "train actor": 10,
    }  # fmt: skip
    assert waiting(f"{GRPO} {BOTH} --vllm_sleep_level 2") == {
        "publish": 60, "collect": 60, "forward reference": 60, "forward actor": 60, "train actor": 0,
    }  # fmt: skip


def test_actor_and_critic_train_in_turn():
    assert peaks(f"{PPO} {BOTH} --ref_reward_offload") == {
        "publish": 10 + 10 + 10 + 3,
        "collect": 60 + 10 + 10,
        "forward reference": 10 + 10 + 10 + 2,
        "forward critic": 20,
        "forward actor": 20 + 3,
        "train actor": 10 + 20 + 60 + 3 + 10,
        "train critic": 10 + 20 + 60 + 10,
    }


def test_flags_say_which_tenants_there_are():
    def rows(words: str) -> set[str]:
        return {str(tenant) for tenant in table_of(words)[0].rows}

    assert rows(f"{GRPO} --colocate_all_models --device cpu") == set()
    assert rows(f"{GRPO} {BOTH}") == {"vllm.weights", "vllm.cache", "actor.optim", "actor.grad"}
    assert rows(f"{PPO} {BOTH} --deepspeed_sleep_states param") == {
        "vllm.weights", "vllm.cache", "actor.param", "critic.param",
    }  # fmt: skip
    shared = "--placement actor=0;ref=0;vllm=1 --deepspeed_enable_sleep --ref_reward_offload"
    assert rows(f"{GRPO} {shared}") == {"actor.optim", "actor.grad", "reference.param"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--colocate_all_models", []),
        ("--colocate_all_models --vllm_enable_sleep", ["pages of their cache"]),
        ("--colocate_all_models --vllm_enable_sleep --rollout_backend hf", ["free nothing"]),
        (
            "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep",
            ["pages of their cache", "wait in files"],
        ),
        ("--colocate_actor_ref --ref_reward_offload --zero_stage 2", ["wait in files"]),
        ("--ref_reward_offload --zero_stage 3", ["frees nothing"]),
    ],
)
def test_a_cpu_says_what_sleep_comes_to(words, said):
    config = ppo(f"{GRPO} {words} --device cpu")
    lines = lines_on_a_cpu(config, "cpu")
    assert len(lines) == len(said) and all(
        part in line for part, line in zip(said, lines, strict=True)
    )
    assert lines_on_a_cpu(config, "cuda") == []


class Engine:
    async def call(self, method: str) -> list:
        assert method == "memory"
        return [
            MemoryUse(2**30, 2 * 2**30, 3 * 2**30, 4 * 2**30),
            MemoryUse(2**31, 0, 2**30, 2**30),
        ]


def test_memory_lines_and_figures(capsys):
    log = MemoryLog()
    asyncio.run(log("sync", {"vllm": Engine()}))
    assert capsys.readouterr().out.splitlines() == [
        "memory after sync | vllm 0: GPU 2.00 GiB allocated, 3.00 reserved, 4.00 free; host 1.00"
        " GiB | vllm 1: GPU 0.00 GiB allocated, 1.00 reserved, 1.00 free; host 2.00 GiB"
    ]
    assert {name: m.value for name, m in log.metrics().items()} == {
        "perf/memory_host_gib": 2.0, "perf/memory_gpu_allocated_gib": 2.0, "perf/memory_gpu_reserved_gib": 3.0,
        "perf/memory_gpu_free_gib": 1.0,
    }  # fmt: skip
    assert log.metrics() == {}


def test_memory_of_this_process_counts_what_it_allocates():
    before = memory_use("cpu")
    kept = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = memory_use("cpu")
    assert after.host - before.host > 60 * 2**20 and kept.all()
    assert after.allocated is None and show(after).startswith("host ")


@pytest.mark.parametrize("part", [RolePart("reward", "param"), RolePart("critic", "optim")])
def test_tenants_of_roles_that_the_run_lacks_have_no_row(part):
    config = ppo(f"{GRPO} {BOTH}")
    plan = plan_placement(
        role_requests(config.placement, config.engine, ["actor"], leaders(config)), "cpu", []
    )
    assert part not in ResidencyTable.of(plan, [part]).rows
