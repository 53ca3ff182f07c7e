"""--dry_run of every command that trains shows the first row as the model sees it."""

from __future__ import annotations

import json

import pytest

from openrl.cli import supervised, train_ppo_ray
from openrl.cli.run import command
from openrl.config.commands import DPOConfig, PPOConfig, RMConfig, SFTConfig
from tests.tiny import tiny_model_dir

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}\n{% else %}){% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a({% endif %}"
)
ROW = {
    "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}],
    "prompt": "1+1",
    "chosen": "2",
    "rejected": "11",
    "label": True,
    "input": "1+1",
}
ANSWERS = "--prompt_key prompt"
CASES = {
    "sft": (SFTConfig, "--multiturn --input_key messages", ["u(1+1)a({+2<eos>+}"]),
    "rm": (RMConfig, ANSWERS, ["u(1+1)a({+2<eos>+}", "u(1+1)a({+11<eos>+}"]),
    "dpo": (DPOConfig, ANSWERS, ["u(1+1)a({+2<eos>+}", "u(1+1)a({+11<eos>+}"]),
    "ppo": (PPOConfig, "", ["First prompt: 8 tokens\nu(1+1)a("]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_row(name, tmp_path, capsys):
    config, more, expected = CASES[name]
    model = tiny_model_dir(tmp_path)
    (tmp_path / "chat.jinja").write_text(CHAT)
    (tmp_path / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return 0\n"
    )
    flags = (
        f"--pretrain {model} --apply_chat_template --tokenizer_chat_template {tmp_path}/chat.jinja"
    )
    flags += f" --save_path {tmp_path}/out --device cpu --dry_run {more}"
    if name == "ppo":
        flags += f" --prompt_data {tmp_path}/rows.jsonl --remote_rm_url {tmp_path}/reward.py"
        flags += " --rollout_batch_size 1 --n_samples_per_prompt 2 --train_batch_size 2"
        flags += " --micro_train_batch_size 1 --prompt_max_len 40 --generate_max_len 8"
        flags += " --advantage_estimator group_norm --rollout_backend hf"
        steps = (train_ppo_ray.prepare, train_ppo_ray.run)
    else:
        flags += f" --dataset {tmp_path}/rows.jsonl --train_batch_size 1 --micro_train_batch_size 1 --max_len 40"
        steps = (supervised.prepare, supervised.run)
    code = command(config, *steps, argv=flags.split())
    printed = capsys.readouterr()
    assert code == 0, printed.err
    for text in expected:
        assert text in printed.out
    assert not (tmp_path / "out").exists()
