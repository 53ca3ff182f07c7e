"""What a user can get wrong, through the real commands: one clear message, nothing started, no
traceback.

Whole processes where the process is the point; elsewhere the same command in this process, which
saves its imports."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import datasets
import pytest
from transformers import GPT2Config

from openrl.agents.setup import AgentSetup
from openrl.cli import supervised, train_ppo_ray
from openrl.cli.run import command
from openrl.cluster.group import LocalGroup
from openrl.config.commands import PPOConfig, SFTConfig
from openrl.config.groups.agent import AgentFlags, EnvironmentFlags
from openrl.config.groups.data import TemplateFlags
from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import UserError
from openrl.rewards.build import RewardSetup
from openrl.types import Prompt, Sampling
from openrl.workers.rollout_worker import RolloutRequest, RolloutWorker
from tests.e2e.runs import make_task, ppo_flags, start
from tests.marks import full_after
from tests.patience import PATIENCE
from tests.tiny import rollout_spec, tiny_tokenizer

COMMANDS = {"train_ppo_ray": (PPOConfig, train_ppo_ray), "train_sft": (SFTConfig, supervised)}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(autouse=True)
def no_bars():
    """The commands say so by environment variables, which come too late for what this process has
    imported."""
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def attempt(capsys, tmp_path):
    """Run a command in this process; its message on stderr, once the exit code is right and nothing
    was written."""

    def attempt(flags: list[str], code: int = 2, prog: str = "train_ppo_ray") -> str:
        config_type, module = COMMANDS[prog]
        before, run = set(tmp_path.iterdir()), module.run if code == 0 else must_not_run
        try:
            found = command(config_type, module.prepare, run, argv=flags)
        except SystemExit as end:
            found = end.code
        out, err = capsys.readouterr()
        assert found == code, err
        assert set(tmp_path.iterdir()) - {tmp_path / "__pycache__"} == before
        return out if code == 0 else err

    return attempt


def must_not_run(config, inputs):
    raise AssertionError("what should have been refused would start now")


def finish(process) -> tuple[int, str]:
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


# -- flags and paths: all at once, by a real process -----------------------------------------------


def test_everything_wrong_with_flags_and_paths_is_reported_together(task, tmp_path):
    (tmp_path / "occupied").write_text("")
    changes = {
        "pretrain": tmp_path / "no_model",
        "prompt_data": tmp_path / "none.jsonl",
        "remote_rm_url": tmp_path / "none.py",
        "n_samples_per_prompt": 1,
        "train_batch_size": 12,
        "micro_train_batch_size": 5,
        "save_path": tmp_path / "occupied" / "run",
        "ckpt_path": tmp_path / "occupied",
        "actor_lerning_rate": 1e-3,
        "generate-max-len": 4,
    }
    code, output = finish(start("train_ppo_ray", ppo_flags(task, tmp_path / "out", **changes)))
    assert code == 2 and "Traceback" not in output
    assert output.startswith("train_ppo_ray: 10 problems, nothing was started\n")
    for line, remedy in (
        ("--actor_lerning_rate: no such flag", "--actor_learning_rate"),
        ("--generate-max-len: no such flag", "--generate_max_len"),
        ("--rollout_batch_size, --n_samples_per_prompt, --train_batch_size: 8 * 1 = 8 samples", "--train_batch_size 8 --micro_train_batch_size 4"),
        ("--train_batch_size, --micro_train_batch_size: 12 samples are not a multiple of 5", "--train_batch_size 8 --micro_train_batch_size 4"),
        ("--advantage_estimator, --n_samples_per_prompt: group_norm compares", "--n_samples_per_prompt 8"),
        (f"--pretrain: no such directory: {tmp_path}/no_model", "a model directory"),
        (f"--prompt_data: no such file or directory: {tmp_path}/none.jsonl", "one of"),
        (f"--remote_rm_url: no such file: {tmp_path}/none.py", None),
        (f"--save_path: {tmp_path}/occupied is a file, not a directory", "another path"),
        (f"--ckpt_path: {tmp_path}/occupied is a file, not a directory", "another path"),
    ):  # fmt: skip
        found = re.search(rf"\d+\. {re.escape(line)}.*\n(?: +try: (.*))?", output)
        assert found, (line, output)
        assert remedy is None or found[1].startswith(remedy)
    assert not (tmp_path / "out").exists()
    changes |= {"kl_target": "low", "train_batch_size": "many"}
    code, output = finish(start("train_ppo_ray", ppo_flags(task, tmp_path / "out", **changes)))
    assert code == 2 and output.startswith("train_ppo_ray: 4 problems, nothing was started\n")
    assert "--kl_target: " in output and "--train_batch_size: expected" in output


def test_supervised_flags_and_paths_are_reported_together(tmp_path):
    words = (
        "--pretrain ./no_model --dataset ./none.jsonl --train_batch_size 9"
        f" --micro_train_batch_size 2 --max_length 3 --save_path {tmp_path}"
    )
    code, output = finish(start("train_sft", words.split()))
    assert code == 2 and "Traceback" not in output
    assert output.startswith("train_sft: 4 problems, nothing was started\n")
    for flags in (
        "--max_length",
        "--train_batch_size, --micro_train_batch_size",
        "--pretrain",
        "--dataset",
    ):
        assert f". {flags}: " in output


def test_a_misspelt_flag_hides_nothing_of_data_and_models(attempt, task, tmp_path):
    misspelt = {"actor_lerning_rate": 1e-3}
    known = "--actor_lerning_rate: no such flag\n       try: --actor_learning_rate\n"
    message = attempt(ppo_flags(task, tmp_path / "out", **misspelt, input_key="question"))
    flags, _, rest = message.partition("train_ppo_ray: apart from that: ")
    assert flags.endswith(known) and "--input_key: " in rest
    assert rest.endswith("nothing was started\n")
    assert attempt(ppo_flags(task, tmp_path / "out", **misspelt)).endswith(known)


@pytest.mark.parametrize("place", ["/proc/openrl", "/sys/openrl"])
def test_a_place_that_not_even_root_can_write_to(attempt, task, place):
    flags = ppo_flags(task, Path(place))
    message = attempt(flags)
    assert f"--save_path: {Path(place).parent} is not writable" in message
    assert f"--ckpt_path: {Path(place).parent} is not writable" in message


def test_a_device_that_is_settled_late_still_ends_before_the_start(
    attempt, task, tmp_path, monkeypatch
):
    """--device auto becomes cpu once torch is asked: the number of ranks, and so the batches, are
    known then."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = attempt(ppo_flags(task, tmp_path / "out", device="auto", actor_num_nodes=3))
    assert (
        "--train_batch_size, --actor_num_nodes, --actor_num_gpus_per_node: 16 samples do not divide"
        " evenly among 3" in message
    )
    assert "try: a number of actor ranks that divides 32, such as 2" in message
    assert message.endswith("nothing was started\n")


# -- model and tokenizer ---------------------------------------------------------------------------


def test_a_directory_without_a_model_or_a_tokenizer(attempt, task, tmp_path):
    shutil.copytree(task / "model", copy := tmp_path / "model")
    flags = ppo_flags(task, tmp_path / "out", pretrain=copy, ref_pretrain=copy)
    (copy / "model.safetensors").unlink()
    message = attempt(flags)
    for flag in ("pretrain", "ref_pretrain"):
        assert f"--{flag}: {copy} is not a complete model; missing: weights" in message
    for path in copy.glob("tokenizer*"):
        path.unlink()
    assert (
        f"--pretrain: {copy} is not a complete model; missing: weights, tokenizer files"
        in attempt(flags)
    )
    shutil.copy(task / "model/model.safetensors", copy)
    (copy / "tokenizer.json").write_text("{}")
    message = attempt(flags)
    assert f"train_ppo_ray: --pretrain: cannot load the tokenizer of {copy}" in message
    assert message.count("\n") < 8 and message.endswith("nothing was started\n")


@pytest.mark.parametrize("prog", COMMANDS)
def test_a_chat_template_is_asked_for_and_there_is_none(attempt, task, tmp_path, prog):
    message = attempt(flags_of(prog, task, tmp_path / "out", apply_chat_template=True), prog=prog)
    assert (
        f"{prog}: --apply_chat_template: the tokenizer of {task}/model has no chat template"
        in message
    )
    assert (
        "try: --tokenizer_chat_template FILE, or leave the flag out and wrap prompts with"
        " --input_template" in message
    )


# -- adapters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prog", COMMANDS)
def test_adapters_that_no_layer_takes(attempt, task, tmp_path, prog):
    flags = flags_of(prog, task, tmp_path / "out", lora_rank=4, target_modules="query_key_value")
    message = attempt(flags, prog=prog)
    assert message.startswith(f"{prog}: --target_modules query_key_value: Target modules ")
    assert "try: names such as down_proj gate_proj k_proj o_proj q_proj up_proj v_proj" in message
    assert message.endswith("nothing was started\n")
    message = attempt(
        flags_of(prog, task, tmp_path / "out", lora_rank=4, target_modules="embed_tokens"),
        prog=prog,
    )
    assert "--target_modules: model.embed_tokens is not a linear layer" in message
    message = attempt(
        flags_of(prog, task, tmp_path / "out", lora_rank=4, target_modules="lm_head"), prog=prog
    )
    assert "--target_modules: the output head takes no adapter" in message


def test_adapters_that_no_layer_of_the_critic_takes(attempt, task, tmp_path):
    critic = shutil.copytree(task / "model", tmp_path / "critic")
    GPT2Config(n_layer=1, n_embd=32, n_head=2).save_pretrained(critic)
    changes = {
        "lora_rank": 4,
        "target_modules": "q_proj",
        "critic_pretrain": critic,
        "advantage_estimator": "gae",
    }
    message = attempt(flags_of("train_ppo_ray", task, tmp_path / "out", **changes))
    assert f"--critic_pretrain {critic}: --target_modules q_proj: Target modules" in message
    assert "try: names such as c_attn c_fc c_proj" in message


@pytest.mark.parametrize("prog", COMMANDS)
def test_4_bit_weights_without_adapters(attempt, task, tmp_path, prog):
    message = attempt(
        flags_of(prog, task, tmp_path / "out", load_in_4bit=True, param_dtype="bf16"), prog=prog
    )
    assert (
        "--load_in_4bit, --lora_rank: 4-bit weights can be trained only through adapters" in message
    )
    assert "try: --lora_rank 16" in message


# -- places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said", "remedy"),
    [
        ({"vllm_gpu_memory_utilization": 1.5}, "--vllm_gpu_memory_utilization: must be", None),
        (
            {"colocate_all_models": True, "actor_num_gpus_per_node": 2, "vllm_num_engines": 1},
            "--colocate_all_models, --vllm_num_engines: ",
            "--vllm_num_engines 2",
        ),
        (
            {"colocate_actor_ref": True, "ref_num_gpus_per_node": 2},
            (
                "--ref_num_gpus_per_node, --actor_num_gpus_per_node: reference and actor share"
                " places, so their numbers must be equal"
            ),
            "leave --ref_num_gpus_per_node out",
        ),
        (
            {"vllm_tensor_parallel_size": 3},
            "--vllm_tensor_parallel_size 3 does not divide the 2 attention heads of the model",
            "--vllm_tensor_parallel_size 1 or 2",
        ),
        (
            {"vllm_enable_sleep": True},
            "--vllm_enable_sleep: the engines share no GPU with another role",
            "--colocate_all_models",
        ),
        (
            {"vllm_max_model_len": 20},
            (
                "--vllm_max_model_len, --prompt_max_len, --generate_max_len: prompt and response"
                " may have 28 tokens together"
            ),
            "--vllm_max_model_len 28",
        ),
        (
            {
                "use_dynamic_batch": True,
                "train_max_tokens_per_gpu": 20,
                "micro_train_batch_size": None,
            },
            "--train_max_tokens_per_gpu",
            "--train_max_tokens_per_gpu 28",
        ),
        (
            {"param_dtype": "bf16", "vllm_dtype": "fp16"},
            "--vllm_dtype, --param_dtype: bf16 values can exceed 65504",
            "--vllm_dtype auto",
        ),
    ],
)
def test_places_and_lengths_that_do_not_fit(attempt, task, tmp_path, changes, said, remedy):
    message = attempt(ppo_flags(task, tmp_path / "out", **changes))
    assert said in message and (remedy is None or f"try: {remedy}" in message)


# -- data ------------------------------------------------------------------------------------------


def flags_of(prog: str, task: Path, out: Path, **changes: object) -> list[str]:
    """Flags of a small run of either command; ``data`` names its rows."""
    data = changes.pop("data", task / "prompts.jsonl")
    if prog == "train_ppo_ray":
        return ppo_flags(task, out, **({"prompt_data": data} | changes))
    given = {
        "pretrain": task / "model",
        "dataset": data,
        "output_key": "label",
        "save_path": out,
    } | changes
    given |= {"ckpt_path": out / "checkpoints", "device": "cpu"}
    return [
        word
        for name, value in given.items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]


@pytest.mark.parametrize("prog", COMMANDS)
def test_a_dataset_without_the_key_lists_the_keys_it_has(attempt, task, tmp_path, prog):
    rows = [{"question": "1+1=", "meta": {"answer": "2"}}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = attempt(
        flags_of(prog, task, tmp_path / "out", data=tmp_path / "rows.jsonl"), prog=prog
    )
    assert (
        f"--input_key: {tmp_path}/rows.jsonl has no key 'input'; it has question, meta, meta.answer"
        in message
    )
    assert "try: --input_key with one of these\nnothing was started" in message
    flags = flags_of(
        prog, task, tmp_path / "out", data=tmp_path / "rows.jsonl", input_key="question"
    )
    other = "label_key" if prog == "train_ppo_ray" else "output_key"
    assert f"--{other}: {tmp_path}/rows.jsonl has no key 'label'" in attempt(flags, prog=prog)


@pytest.mark.parametrize("prog", COMMANDS)
@pytest.mark.parametrize(
    "name", ["empty.jsonl", "blank.jsonl", "empty.json", "head.csv", "saved", "nothing"]
)
def test_a_dataset_without_rows(attempt, task, tmp_path, prog, name):
    path = tmp_path / name
    if name == "saved":
        datasets.Dataset.from_dict({"input": [], "label": []}).save_to_disk(path)
    elif name == "nothing":
        path.mkdir()
    else:
        text = {
            "empty.jsonl": "",
            "blank.jsonl": "\n\n",
            "empty.json": "[]",
            "head.csv": "input,label\n",
        }
        path.write_text(text[name])
    message = attempt(flags_of(prog, task, tmp_path / "out", data=path), prog=prog)
    flag = "prompt_data" if prog == "train_ppo_ray" else "dataset"
    assert message.startswith(f"{prog}: --{flag}: ") and str(path) in message
    assert message.count("\n") <= 3 and message.endswith("nothing was started\n")


def test_rows_that_cannot_be_used_are_named(attempt, task, tmp_path):
    rows = [
        {"input": "1+1=", "label": "2"},
        {"input": "", "label": "3"},
        {"input": None, "label": "4"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = attempt(ppo_flags(task, tmp_path / "out", prompt_data=tmp_path / "rows.jsonl"))
    assert "rows 1, 2: input: empty" in message


def test_a_figure_that_the_evaluation_does_not_have(attempt, task, tmp_path):
    evaluated = {
        "eval_dataset": task / "prompts.jsonl",
        "eval_steps": 1,
        "best_metric_key": "eval/passrate",
    }
    message = attempt(flags_of("train_ppo_ray", task, tmp_path / "out", **evaluated))
    assert (
        "--best_metric_key: the evaluation has no metric 'eval/passrate', but eval/pass_rate, "
        in message
    )
    assert (
        "val-core/default/acc/mean@" in message
        and "try: --best_metric_key eval/pass_rate" in message
    )


def test_fewer_prompts_than_a_step_takes(attempt, task, tmp_path):
    message = attempt(ppo_flags(task, tmp_path / "out", rollout_batch_size=64))
    assert "--rollout_batch_size asks for 64 prompts per step, but the data has 40" in message


def test_long_prompts_are_left_out_counted_and_reported(attempt, task, tmp_path):
    rows = [{"input": "1" * n, "label": ""} for n in range(1, 21)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"prompt_data": tmp_path / "rows.jsonl", "dry_run": True}
    plan = attempt(ppo_flags(task, tmp_path / "out", prompt_max_len=16, **data), code=0)
    line = (
        f"{tmp_path}/rows.jsonl: 16 prompts, longest 20 tokens; 4 of 20 left out, longer than"
        " --prompt_max_len 16"
    )
    assert plan.startswith(line)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "1" * 20, "label": ""}))
    message = attempt(ppo_flags(task, tmp_path / "out", prompt_max_len=16, **data))
    assert "all 1 prompts" in message and "try: --prompt_max_len 20" in message


def test_names_do_not_act_on_the_terminal(attempt, task, tmp_path):
    data = tmp_path / "\x1b[31m[red].jsonl"
    data.write_text("".join(json.dumps({"input": "1", "label": ""}) + "\n" for _ in range(40)))
    plan = attempt(ppo_flags(task, tmp_path / "out", prompt_data=data, dry_run=True), code=0)
    assert "\\x1b[31m[red].jsonl: 40 prompts" in plan and "\x1b" not in plan


def test_difficulties_that_are_missing_or_no_shares(attempt, task, tmp_path):
    levels = [0.5, 0, 1, 2, "hard", None, 0.25]
    rows = [
        {"input": f"{i}=", "label": "x", "extra": {"level": level}}
        for i, level in enumerate(levels)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    data = {"prompt_data": tmp_path / "rows.jsonl", "difficulty_loss_weight": True}
    message = attempt(ppo_flags(task, tmp_path / "out", **data))
    assert "--difficulty_key" in message and "rows 0, 1, 2, 3: no column 'difficulty'" in message
    message = attempt(ppo_flags(task, tmp_path / "out", **data, difficulty_key="extra.level"))
    assert "row 3: 'extra.level' must be a number in [0, 1], found 2" in message
    assert message.endswith("nothing was started\n")


# -- rewards: the file -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def reward_func(:\n    pass", "SyntaxError"),
        (
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module' (reward.py, line 1)",
        ),
        ("x = 1 / 0", "ZeroDivisionError: division by zero (reward.py, line 1)"),
        ("import os\nos._exit(3)", "the reward process exited with status 3"),
        (
            "def my_reward(q, p, l):\n    return [0.0]",
            "it defines no function 'reward_func', but my_reward",
        ),
    ],
)
def test_a_reward_file_that_cannot_be_used(attempt, task, tmp_path, source, said):
    (tmp_path / "reward.py").write_text(source)
    message = attempt(ppo_flags(task, tmp_path / "out", remote_rm_url=tmp_path / "reward.py"))
    assert (
        message.startswith("train_ppo_ray: --remote_rm_url: ")
        and f"{tmp_path}/reward.py" in message
    )
    assert said in message and message.endswith("nothing was started\n")


def test_no_reward_at_all_and_no_such_function(attempt, task, tmp_path):
    assert (
        "--remote_rm_url, --reward_funcs, --reward_pretrain: there is no reward source"
        in attempt(ppo_flags(task, tmp_path / "out", remote_rm_url=None))
    )
    message = attempt(ppo_flags(task, tmp_path / "out", remote_rm_url=f"{task}/reward.py:judge"))
    assert "it defines no function 'judge', but reward_func" in message


# -- rewards: their values -------------------------------------------------------------------------

ROW = """
def reward_func(queries, prompts, labels, responses):
    values = [1.0] * len(queries)
    for i, prompt in enumerate(prompts):
        if prompt.endswith("7+7="):
            {fault}
    return values
"""


def collect_with(task: Path, reward: Path) -> None:
    """Answer two prompts with the real engine, agent and reward in this process."""
    spec = rollout_spec(task / "model", param_dtype="fp32", longest=16)
    flags = RewardFlags(remote_rm_url=str(reward), reward_timeout=3.0, reward_failure_policy="fail")
    agents = AgentSetup(AgentFlags(), EnvironmentFlags(), TemplateFlags())
    rewards = RewardSetup(flags, reward_plan(flags))

    async def scenario() -> None:
        group = LocalGroup.create("vllm", 1, RolloutWorker, "hf", spec, agents, rewards)
        await group.call("start")
        try:
            tokenize = tiny_tokenizer()
            prompts = [
                Prompt(f"train:{i}", tokenize(t).input_ids, t, label=t)
                for i, t in enumerate(["1+2=", "7+7="])
            ]
            for draw, prompt in enumerate(prompts):
                request = RolloutRequest(3, Sampling(max_tokens=4), seed=(0, 1, draw))
                await group.call_one(0, "play", prompt, request)
        finally:
            await group.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "said"),
    full_after(
        1,
        [
            (
                "raise ValueError('no verdict on ' + labels[i])",
                "ValueError: no verdict on 7+7= (reward.py, line 6)",
            ),
            ("return values[1:]", "it returned 0 rewards for 1 row"),
            ("values[i] = float('nan')", "rewards must be finite, it returned nan"),
            ("values[i] = float('inf')", "rewards must be finite, it returned inf"),
            ("values[i] = None", "rewards must be numbers, it returned None"),
            ("return {'scores': values}", "it did not return 'rewards', but 'scores'"),
            ("while True: pass", "nothing came back within 3 s (--reward_timeout)"),
            ("import os; os._exit(3)", "the reward process exited with status 3"),
        ],
    ),
)
def test_a_reward_that_fails_shows_the_row(task, tmp_path, fault, said):
    (tmp_path / "reward.py").write_text(ROW.format(fault=fault))
    with pytest.raises(UserError) as caught:
        collect_with(task, tmp_path / "reward.py")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("a reward failed: reward: ") and said in lines[0]
    assert lines[1:4] == ["  row       train:1", "  prompt    '7+7='", "  label     '7+7='"]
    assert sum(line.startswith("  response  ") for line in lines) == 1
