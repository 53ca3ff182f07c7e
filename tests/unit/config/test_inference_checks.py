"""What the commands that do not train refuse before anything is loaded, and what they let pass."""

from __future__ import annotations

import shlex

import pytest

from openrl.config.commands import COMMANDS
from tests.flags import said

BATCH = "batch_inference --pretrain some/model --dataset some/data --output_path out.jsonl"
EVALUATE = "evaluate --pretrain some/model --prompt_data some/data --reward_funcs number"


def problems(line: str, environment: bool = False) -> str:
    name, *words = shlex.split(line)
    return "\n".join(said(COMMANDS[name], words, environment))


@pytest.mark.parametrize(
    "line",
    [
        "serve_rm --reward_pretrain some/model",
        "serve_rm --remote_rm_url reward.py:score",
        "serve_rm --reward_funcs number exact --reward_weights 1 0.5",
        (
            "lora_combiner --model_path a/b --lora_path c --output_path d --is_rm"
            " --value_head_prefix head"
        ),
        (
            f"{BATCH} --eval_task generate_vllm --best_of_n 8 --reward_pretrain some/rm"
            " --post_processor rs"
        ),
        f"{BATCH} --eval_task generate_vllm --max_num_seqs 256 --enforce_eager",
        f"{BATCH} --eval_task rm --post_processor iter_dpo --dataset_split test",
        (
            f"{BATCH} --eval_task generate --greedy_sampling --enable_csft --iter 3"
            " --rollout_batch_size 64"
        ),
        f"{EVALUATE} --n_samples_per_prompt 16 --k 1 8 --output_path figures.json",
        f"{EVALUATE} --reward_pretrain some/rm --max_len 512",
    ],
)
def test_what_is_right_passes(line):
    assert problems(line) == ""


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("serve_rm", "nothing to serve"),
        (
            "serve_rm --reward_pretrain a/b --reward_funcs number",
            "--reward_funcs, --reward_pretrain: a server can have only one kind",
        ),
        ("serve_rm --reward_pretrain a/b,c/d", "a server can have only one model"),
        (
            "serve_rm --remote_rm_url http://127.0.0.1:1/get_reward",
            "cannot pass requests on to another server",
        ),
        ("serve_rm --reward_funcs nmber", "did you mean 'number'"),
        (
            "serve_rm --reward_funcs number --batch_wait_ms 3",
            "--batch_wait_ms acts with --reward_pretrain",
        ),
        (
            "serve_rm --reward_funcs number --load_in_4bit",
            "--load_in_4bit acts with --reward_pretrain",
        ),
        (
            "serve_rm --reward_pretrain a/b --load_in_4bit --param_dtype fp32",
            "4-bit weights need bf16",
        ),
        (
            "serve_rm --reward_funcs number --normalize_reward",
            "--normalize_reward acts with --reward_pretrain",
        ),
        ("serve_rm --reward_pretrain a/b --host 0.0.0.0", "everyone who can reach 0.0.0.0"),
        (
            "lora_combiner --model_path a/b --lora_path c --output_path d --value_head_prefix h",
            "--value_head_prefix acts with --is_rm",
        ),
        (f"{BATCH} --eval_task generate --post_processor rs", "there are no rewards to choose by"),
        (
            f"{BATCH} --eval_task generate --max_num_seqs 8",
            "--vllm_max_num_seqs acts with --eval_task generate_vllm",
        ),
        (
            f"{BATCH} --eval_task generate --system_prompt x",
            "--system_prompt acts with --apply_chat_template",
        ),
        (
            f"{BATCH} --eval_task generate --reward_pretrain a/b --reward_timeout 5",
            "--reward_timeout acts with --reward_funcs, or with --remote_rm_url",
        ),
        (
            f"{BATCH} --eval_task generate_vllm --vllm_engine_kwargs '{{\"max_num_seqs\": 4}}'",
            "max_num_seqs has its own flag",
        ),
        (
            f'{EVALUATE} --vllm_engine_kwargs \'{{"logprobs_mode": "raw"}}\'',
            "depend on logprobs_mode",
        ),
        (
            f"{EVALUATE} --full_determinism --vllm_max_num_seqs 4",
            "--vllm_max_num_seqs acts without --full_determinism",
        ),
        (
            f"{EVALUATE} --rollout_backend hf --enforce_eager",
            "--enforce_eager acts with --rollout_backend vllm",
        ),
        (
            f"{EVALUATE} --reward_max_retries 2",
            "--reward_max_retries acts with a URL in --remote_rm_url",
        ),
        (
            "serve_rm --reward_pretrain a/b --reward_num_workers 2",
            "--reward_num_workers acts with --reward_funcs, or with a Python file",
        ),
        (f"{BATCH} --eval_task rm --temperature 0.5", "--temperature acts without --eval_task rm"),
        (f"{BATCH} --eval_task rm --csft_prompt x", "--csft_prompt acts with --enable_csft"),
        (f"{BATCH} --eval_task rm --rollout_batch_size 5", "--rollout_batch_size acts with --iter"),
        (
            f"{BATCH} --eval_task rm --reward_template '{{input}}'",
            "--reward_template acts with --post_processor csft",
        ),
        (
            f"{BATCH} --eval_task rm --post_processor csft --reward_template '{{input}}'",
            "must contain {input} and {reward}",
        ),
        (
            f"{BATCH} --eval_task generate --greedy_sampling --temperature 0.5",
            "both set the temperature",
        ),
        (f"{BATCH} --eval_task generate --greedy_sampling --best_of_n 4", "4 equal answers"),
        (f"{BATCH} --eval_task generate --dataset_probs 0.5,0.5", "2 probabilities for 1 dataset"),
        ("evaluate --pretrain a/b --prompt_data c", "nothing says which answers are right"),
        (f"{EVALUATE} --k 9", "k is 9, but each prompt has 8 answers"),
        (f"{EVALUATE} --k 0", "--k: must be > 0, got 0"),
        (f"{EVALUATE} --output_path figures.txt", "--output_path figures.json"),
        (f"{EVALUATE} --temperature -1", "--temperature"),
    ],
)
def test_what_is_wrong_is_named(line, complaint):
    assert complaint in problems(line)


def test_what_this_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENRL_RM_TOKEN", raising=False)
    found = problems(
        f"serve_rm --reward_pretrain {tmp_path}/none --require_token", environment=True
    )
    assert "$OPENRL_RM_TOKEN is not set" in found and "no such directory" in found
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").touch()
    found = problems(
        f"lora_combiner --model_path a/b --lora_path {tmp_path} --output_path {tmp_path}/out",
        environment=True,
    )
    assert "no adapter_config.json" in found and "not an empty directory" in found
    (tmp_path / "file").touch()
    line = (
        "batch_inference --eval_task rm --pretrain a/b --dataset c/d --output_path"
        f" {tmp_path}/file/out.jsonl"
    )
    assert "is a file, not a directory" in problems(line, environment=True)
