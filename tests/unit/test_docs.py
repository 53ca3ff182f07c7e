import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*args: str | Path, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, check=False, capture_output=True, text=True, **kwargs
    )


def test_pages_show_the_present_flags_and_point_at_files_that_exist():
    done = run("docs/build.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plugin_of_the_adding_page_works_as_printed(tmp_path):
    """Its flag reaches its loss; -log p * A is left where log p is above the floor."""
    block = re.search(
        r"```python\n# my_project/losses.py\n(.*?)```",
        (ROOT / "docs/adding.md").read_text(),
        re.DOTALL,
    )
    assert block
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "losses.py").write_text(block[1])
    use = """
import sys, torch
from openrl.config.commands import PPOConfig
from openrl.extension_points import policy_losses
from openrl.flags.parser import load
from openrl.types import LossInputs

argv = "--pretrain some/model --prompt_data some/data --remote_rm_url {reward} --plugin my_project.losses --init_kl_coef 0"
argv += " --advantage_estimator group_norm --n_samples_per_prompt 8 --policy_loss_type plain_reinforce --reinforce_floor -2"
config = load(PPOConfig, argv.format(reward=sys.argv[1]).split(), prog="train_ppo_ray", description="")
options = config.options["policy_loss_type"]
column = torch.tensor([[-1.0, -3.0]])
inputs = LossInputs(
    logprobs=column, old_logprobs=column, rollout_logprobs=column, advantages=2 * torch.ones(1, 2),
    loss_mask=column < 0, turn_ids=column.long(), rewards=torch.ones(1),
)
print(policy_losses["plain_reinforce"].component(inputs, options).per_token.tolist())
"""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n    return [0.0 for _ in queries]\n"
    )
    done = run(
        "-c",
        use,
        reward,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "HOME": str(tmp_path), "PATH": ""},
    )
    assert done.stdout.strip() == "[[2.0, 0.0]]", done.stdout + done.stderr
