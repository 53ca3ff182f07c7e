"""The commands of docs/placement.md mean what the page says."""

import re
import shlex
from pathlib import Path

import pytest

from openrl.cluster.planner import plan_placement, role_requests
from openrl.config.commands import PPOConfig
from openrl.config.derived import leaders
from tests.flags import settle
from tests.unit.cluster.test_placement import gpu_node

PAGE = Path(__file__).parents[3] / "docs/placement.md"
BLOCKS = "\n".join(
    re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
).replace("\\\n", " ")
COMMANDS = [
    line.partition("train_ppo_ray ")[2] for line in BLOCKS.splitlines() if "train_ppo_ray " in line
]
NODES = [gpu_node("a", 8), gpu_node("b", 8)]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_fit_two_nodes_of_eight_gpus(command):
    config, problems = settle(PPOConfig, " ".join(shlex.split(command)))
    assert not [problem for problem in problems if problem.fatal]
    plan = plan_placement(
        role_requests(config.placement, config.engine, config.model_roles, leaders(config)),
        "cuda",
        NODES,
    )
    assert plan.problems(NODES) == []
    assert plan.size("vllm") * config.engine.sizes.width == len(plan.bundles_by_role["vllm"])
    assert all(name in str(plan.render()) for name in plan.bundles_by_role)


def test_the_page_shows_every_way():
    text = " ".join(COMMANDS)
    for flag in (
        "placement",
        "colocate_all_models",
        "vllm_pipeline_parallel_size",
        "vllm_enable_expert_parallel",
    ):
        assert f"--{flag} " in f"{text} "
