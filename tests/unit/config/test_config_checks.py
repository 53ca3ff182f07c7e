"""Rules over the flags of the commands, what follows from flags, and how a command ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from openrl.cli.run import command, find_user_error
from openrl.config import derived
from openrl.config.commands import COMMANDS, PPOConfig, SFTConfig
from openrl.config.derived import largest_divisor, ranks_share_a_step
from openrl.config.groups.batch import RolloutBatchFlags, SupervisedBatchFlags
from openrl.config.groups.reward import bearer_token
from openrl.config.lengths import longest_sequence
from openrl.config.rules.machine import output_problems
from openrl.errors import ErrorCollector, UserError
from openrl.extension_points import advantage_estimators, environments, tool_parsers, trackers
from openrl.flags.dump import dump_yaml, effective_flags
from openrl.flags.parser import ConfigBuilder
from openrl.flags.schema import REQUIRED, collect_flags
from openrl.flags.sources import Setting
from openrl.locks import locked
from openrl.trainer.planning.start_lines import start_lines
from tests.flags import GRPO, PPO, SFT, ppo, said, settle
from tests.patience import PATIENCE


def test_suggested_batch_sizes_work():
    """Whatever does not fit, the remedy is one that fits, or asks for other ranks."""

    def refused(words: str) -> list[str]:
        return [problem.remedy for problem in settle(PPOConfig, words)[1] if problem.fatal]

    fixes = Counter()
    for samples, batch, micro, world in itertools.product((9, 24), (5, 32), (3, 8), (1, 4)):
        words = f"{PPO} --rollout_batch_size {samples} --actor_num_gpus_per_node {world}"
        given = f"--train_batch_size {batch} --micro_train_batch_size {micro}"
        for dynamic in ("", " --use_dynamic_batch"):
            for fix in refused(f"{words}{dynamic} {given}"):
                fixes[fix.startswith("--")] += 1
                assert "ranks" in fix or not refused(f"{words}{dynamic} {given} {fix}"), fix
    assert fixes[True] > 20 and fixes[False] > 3
    assert [largest_divisor(12, limit) for limit in (1, 5, 7, 12, 99)] == [1, 4, 6, 12, 12]


def test_world_size_is_asked_again_when_the_cluster_is_known():
    config = ppo(PPO)
    assert config.placement.ranks_of("actor", config.device.device) is None
    assert not list(ranks_share_a_step(config, 32))
    assert [str(p) for p in ranks_share_a_step(config, 64)] == [
        "--train_batch_size, --micro_train_batch_size: 128 samples are not a multiple of 4 * 64 "
        "(micro_train_batch_size * actor ranks)\n  try: --micro_train_batch_size 2"
    ]


def test_needs_of_components_that_nothing_supplies(monkeypatch):
    entry = replace(advantage_estimators["gae"], needs=frozenset({"tea_leaves"}))
    monkeypatch.setitem(advantage_estimators._entries, "gae", entry)
    assert said(PPOConfig, PPO) == [
        "--advantage_estimator: gae needs tea_leaves, which nothing in this run supplies"
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_warnings_name_flags_of_the_command(name):
    """Every condition can be evaluated, and one that does not hold says how it would."""
    specs = collect_flags(COMMANDS[name])
    builder = ConfigBuilder(COMMANDS[name], specs)
    builder.assign(Setting(s.name, ["generate"]) for s in specs if s.default is REQUIRED)
    builder.read()
    builder.check_components()
    config = builder.build()
    known = {spec.name for spec in specs}
    for spec in specs:
        failing = [c.words_in(known) for c in spec.only_if if not c.holds(config)]
        assert {*re.findall(r"--(\w+)", "".join(failing[:1]))} <= known, spec.name


def test_only_a_run_with_a_critic_freezes_its_actor():
    words = "--freezing_actor_steps 3 --n_samples_per_prompt"
    assert ppo(f"{PPO} {words} 1 --advantage_estimator gae").algorithm.frozen_actor_steps == 4
    without, problems = settle(PPOConfig, f"{GRPO} {words} 8")
    assert without.algorithm.frozen_actor_steps == 0
    assert "--freezing_actor_steps acts" in str(problems[0]) and not problems[0].fatal


@pytest.mark.parametrize(
    "url", ["--tools https://h/mcp?api_key=s3cret", "--ckpt_upload_dir ftp://me:s3cret@h/run"]
)
def test_a_key_in_a_url_is_not_written(url, monkeypatch):
    typed = f"{PPO} --apply_chat_template {url}".split()
    monkeypatch.setattr(sys, "argv", ["p", *typed])
    config, problems = settle(PPOConfig, typed)
    assert ["looks like a secret" in str(problem) for problem in problems] == [True]
    assert "s3cret" not in dump_yaml(config) + json.dumps(effective_flags(config)) + str(sys.argv)


def test_a_dumped_config_warns_of_nothing(tmp_path):
    config = ppo(GRPO + " --lr_scheduler constant --rollout_backend hf --init_kl_coef 0")
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    assert ppo(f"--config {tmp_path / 'run.yaml'}") == config


# -- this machine ----------------------------------------------------------------------------------


def model_dir(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).write_text("{}")
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory where a sound run could start, and its flags."""
    monkeypatch.chdir(tmp_path)
    model_dir(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "reward.py").write_text("")
    return "--pretrain ./model --prompt_data train.jsonl --remote_rm_url reward.py:f"


@pytest.mark.parametrize("token", ["s3cr\u00e9t", "s3cret\nx"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(here, monkeypatch, token):
    monkeypatch.setenv("OPENRL_RM_TOKEN", token)
    (found,) = said(PPOConfig, here, environment=True)
    assert (
        "$OPENRL_RM_TOKEN has characters that an HTTP header cannot contain" in found
        and "s3c" not in found
    )
    monkeypatch.setenv("OPENRL_RM_TOKEN", "s3cret\n")
    assert said(PPOConfig, here, environment=True) == [] and bearer_token() == "s3cret"


def test_directories_that_cannot_be_written(tmp_path):
    assert not list(output_problems("save_path", str(tmp_path / "a" / "b")))
    assert not list(tmp_path.iterdir())
    # refused to root, too, whatever the mode bits say
    (problem,) = output_problems("save_path", "/proc/a/b")
    assert str(problem).startswith("--save_path: /proc is not writable")
    (tmp_path / "file").write_text("")
    (problem,) = output_problems("save_path", str(tmp_path / "file" / "b"))
    assert str(problem).startswith(f"--save_path: {tmp_path}/file is a file, not a directory")


def test_a_run_that_another_one_writes_to_is_refused(here):
    with locked(Path("runs/mine"), "save_path"):
        (problem,) = said(PPOConfig, f"{here} --save_path runs/mine", environment=True)
    assert problem.startswith(
        f"--save_path: runs/mine is in use by another run: process {os.getpid()}"
    )
    assert problem.endswith("\n  try: another --save_path, or stop that run first")


# -- derived ---------------------------------------------------------------------------------------


def test_arithmetic_of_steps():
    batch = RolloutBatchFlags(
        rollout_batch_size=32,
        n_samples_per_prompt=4,
        train_batch_size=64,
        max_epochs=3,
        num_episodes=2,
    )
    assert batch.samples_per_step == 128
    assert batch.optimizer_steps_per_rollout == 6
    assert batch.total_steps(100) == 7  # 200 prompts, 32 each: 6.25
    assert batch.total_steps(96) == 6
    assert batch.total_optimizer_steps(100) == 42
    assert replace(batch, max_steps=3).total_steps(100) == 3
    rows = SupervisedBatchFlags(train_batch_size=128, max_epochs=2)
    assert rows.total_steps(1000) == 16  # 2000 rows, 128 each: 15.6
    assert rows.total_steps(10) == 1


@pytest.mark.parametrize(
    ("flag", "registry"),
    [("env_tags", environments), ("track_with", trackers)],
)
def test_help_lists_what_there_is(flag, registry):
    """It does not read the registries, whose entries load libraries."""
    (help_text,) = [spec.help for spec in collect_flags(PPOConfig) if spec.name == flag]
    assert {*registry.names()} <= {*re.findall(r"\w+", help_text)}


def test_the_page_of_tools_lists_every_parser():
    """Too many for --help, which points to the page."""
    page = Path(__file__).parents[3] / "docs" / "tools.md"
    assert {*tool_parsers.names()} <= {*re.findall(r"\w+", page.read_text())}


def test_models_that_a_run_needs():
    assert ppo(PPO).model_roles == ("actor", "critic", "reference")
    assert ppo(GRPO + " --init_kl_coef 0").model_roles == ("actor",)
    words = (
        "--pretrain m --prompt_data d --reward_pretrain r --actor_num_nodes 2"
        " --actor_num_gpus_per_node 4"
    )
    assert ppo(words).model_roles == ("actor", "critic", "reference", "reward")
    assert ppo(words).placement.ranks_of("actor", "auto") == 8
    assert ppo(PPO).placement.ranks_of("actor", "cpu") == 1
    assert longest_sequence(ppo(PPO + " --max_new_tokens 24")) == 1048


def test_kl_is_in_the_reward_or_in_the_loss():
    assert ppo(GRPO).kl.in_reward
    assert not ppo(GRPO + " --use_kl_loss --kl_estimator k2").kl.in_reward
    assert not ppo(GRPO + " --init_kl_coef 0").kl.in_reward
    own = ppo(GRPO + " --use_kl_loss --kl_estimator k2 --kl_loss_coef 0.3")
    assert not own.kl.in_reward and own.kl.needs_reference


@pytest.mark.parametrize(
    ("words", "reward", "loss", "controller", "measured", "top_k"),
    [
        ("", True, False, True, "k1", None),
        ("--kl_estimator full", True, False, True, "full", 128),
        ("--use_kl_loss --kl_loss_estimator full --kl_full_topk 0", False, True, True, "full", 0),
        (
            "--use_kl_loss --kl_loss_estimator k3 --kl_loss_coef 0.3 --init_kl_coef 0",
            False,
            True,
            False,
            "k3",
            None,
        ),
        ("--use_kl_loss --kl_loss_estimator k2 --add_token_level_kl", True, True, True, "k1", None),
        (
            "--use_kl_loss --kl_loss_estimator full --add_token_level_kl --kl_loss_coef 0.1",
            True,
            True,
            True,
            "k1",
            128,
        ),
        (
            "--log_ref_kl --init_kl_coef 0 --kl_estimator full --kl_full_topk 9",
            False,
            False,
            False,
            "full",
            9,
        ),
    ],
)
def test_terms_of_the_kl(words, reward, loss, controller, measured, top_k):
    config = ppo(f"{GRPO} {words}")
    assert config.kl.needs_reference
    assert (config.kl.in_reward, config.kl.in_loss) == (reward, loss)
    assert config.kl.controlled == controller
    assert config.kl.measured_estimator == measured
    assert config.kl.full_top_k == top_k


def test_components_suggest_and_flags_decide(monkeypatch):
    assert ppo(PPO).algorithm.whitens and not ppo(GRPO).algorithm.whitens
    assert ppo(GRPO + " --whiten_advantages").algorithm.whitens
    assert not ppo(PPO + " --no_whiten_advantages").algorithm.whitens
    assert ppo(PPO).algorithm.aggregation == "token-mean"
    assert (
        ppo(PPO + " --loss_agg_mode seq-mean-token-sum").algorithm.aggregation
        == "seq-mean-token-sum"
    )
    suggesting = replace(
        advantage_estimators["gae"], suggests={"loss_agg_mode": "seq-mean-token-mean"}
    )
    monkeypatch.setitem(advantage_estimators._entries, "gae", suggesting)
    assert ppo(PPO).algorithm.aggregation == "seq-mean-token-mean"
    assert ppo(PPO + " --loss_agg_mode token-mean").algorithm.aggregation == "token-mean"


# -- how a command ends ----------------------------------------------------------------------------


class RemoteError(Exception):
    """As Ray's: keeps what the worker raised in ``.cause``."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("a long traceback of the worker")
        self.cause = cause


class BothErrors(RemoteError, UserError):
    """As Ray's: also an instance of the worker's class."""


def episode_end(error: BaseException | None, while_preparing: bool = False) -> int:
    def fail(*_: object) -> None:
        if error:
            raise error

    prepare, run = (fail, print) if while_preparing else (lambda config: None, fail)
    return command(SFTConfig, prepare, run, argv=SFT.split())


WRONG_ROW = UserError("row 3 is wrong", "mend it")


@pytest.mark.parametrize(
    "error",
    [
        WRONG_ROW,
        RemoteError(WRONG_ROW),
        BothErrors(WRONG_ROW),
        ExceptionGroup("all", [RemoteError(WRONG_ROW)]),
    ],
)
def test_user_errors_end_with_one_message(error, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # nobody asks whether the Hub has "m"
    assert episode_end(error) == 1
    assert capsys.readouterr().err == "train_sft: row 3 is wrong\n  try: mend it\n"


def test_an_error_before_the_start_is_told_apart(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert episode_end(WRONG_ROW, while_preparing=True) == 2
    assert (
        capsys.readouterr().err
        == "train_sft: row 3 is wrong\n  try: mend it\nnothing was started\n"
    )


def test_causes_are_searched():
    outer = ValueError("outer")
    outer.__cause__ = RemoteError(WRONG_ROW)
    assert find_user_error(outer) is WRONG_ROW
    assert find_user_error(ValueError()) is None
    # as a worker group raises it: the worker's own error, from Ray's
    wrapped = BothErrors(WRONG_ROW)
    plain = UserError("row 3 is wrong", "mend it")
    wrapped.cause, plain.__cause__ = plain, wrapped
    assert find_user_error(plain) is plain
    loop = RemoteError(ValueError())
    loop.cause = loop
    assert find_user_error(loop) is None


def test_other_ends(capsys):
    assert episode_end(None) == 0
    assert episode_end(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):  # a defect keeps its traceback
        episode_end(ZeroDivisionError())


HEAVY = (
    "ray",
    "vllm",
    "deepspeed",
    "transformers",
    "datasets",
    "wandb",
    "tensorboard",
)


@pytest.mark.parametrize("command_type", ["PPOConfig", "SFTConfig"])
def test_help_loads_no_heavy_library(command_type):
    program = (
        "import sys\n"
        "from openrl.cli.run import command\n"
        f"from openrl.config.commands import {command_type}\n"
        "try:\n"
        f"    command({command_type}, None, None, argv=['--help'])\n"
        "finally:\n"
        f"    print('loaded:', *sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("usage: train_")
    assert done.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize("started", [False, True])
def test_sigterm_is_no_failure_of_what_it_meets(capsys, started):
    """It comes while a row is read or an optional package is tried, and ends the command at once."""
    before = signal.getsignal(signal.SIGTERM)
    collector, after = ErrorCollector(), []

    def met(*_):
        try:
            with collector:
                os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            after.append("taken for a failure")
        after.append("went on")

    steps = (lambda config: None, met) if started else (met, after.append)
    try:
        code = command(SFTConfig, *steps, argv=SFT.split())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 143 and not after
    said = capsys.readouterr().err.splitlines()
    assert said[-1 if started else -2] == "train_sft: SIGTERM: ended"
    assert started or said[-1] == "nothing was started"


def test_a_full_disk_is_no_defect(capsys):
    def fill(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/config.yaml")

    assert command(SFTConfig, lambda c: None, fill, argv=SFT.split()) == 1
    assert (
        "train_sft: [Errno 28] No space left on device: '/runs/config.yaml'"
        in capsys.readouterr().err
    )


def test_a_process_leaves_with_its_code_its_output_and_what_libraries_do_at_exit():
    program = (
        "import atexit\n"
        "from openrl.processes.leave import leave\n"
        "class Late:\n"
        "    def __del__(self):\n"
        "        print('taken apart')\n"
        "late = Late()\n"
        "atexit.register(print, 'at exit')\n"
        "print('output')\n"
        "leave(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout.split("\n")) == (3, ["output", "at exit", ""])


@pytest.mark.parametrize("tool", ["cProfile", "trace"])
def test_what_watches_a_program_hears_of_its_end(tmp_path, tool):
    """A profiler writes its file when the program has ended, and so does a tracer of lines, which
    is what coverage is."""
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text("from openrl.processes.leave import leave\nleave(3)\n")
    words = {
        "cProfile": ["-m", "cProfile", "-o", str(out)],
        "trace": ["-m", "trace", "--count", "--file", str(out), "--coverdir", str(tmp_path)],
    }
    subprocess.run([sys.executable, *words[tool], str(program)], check=False, timeout=PATIENCE)
    assert out.stat().st_size > 0


@pytest.mark.parametrize("output", ["", ">&-"])
def test_a_process_leaves_with_its_code_where_nobody_reads_its_output(output):
    program = "from openrl.processes.leave import leave; print('output'); leave(3)"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {output}', sys.executable, program],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        timeout=PATIENCE,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (3, b"")


ONE_STEP = f"{GRPO} --rollout_batch_size 16 --train_batch_size 128 --init_kl_coef 0"
WEIGHED = f"{ONE_STEP} --enable_vllm_is_correction"


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (ONE_STEP, "update"),
        (WEIGHED, "update"),
        (f"{WEIGHED} --use_icepop --vllm_is_level segment", "update"),
        (f"{WEIGHED} --vllm_is_level sequence", "update"),
        (f"{WEIGHED} --vllm_is_correction_type seq-mask-tis", "update"),
        (f"{WEIGHED} --vllm_is_level sequence --agent_func_path a.py", "forward"),
        (f"{WEIGHED} --vllm_is_correction_type seq-mask-tis --agent_func_path a.py", "forward"),
        (f"{WEIGHED} --vllm_is_level segment --agent_func_path a.py", "update"),
        (f"{WEIGHED} --vllm_is_level sequence --rollout_dump_dir r", "forward"),
        (f"{WEIGHED} --vllm_is_batch_normalize", "forward"),
        (f"{WEIGHED} --rollout_rs token_k2 --rollout_rs_threshold 1", "forward"),
        (f"{WEIGHED} --lora_rank 4 --lora_dropout 0.1", "forward"),
        (f"{WEIGHED} --max_epochs 2", "forward"),
        (f"{WEIGHED} --skip_old_logprob never", "forward"),
        (f"{ONE_STEP} --rollout_rs token_k2 --rollout_rs_threshold 1", "forward"),
        (f"{ONE_STEP} --policy_loss_type clip_cov", "forward"),
        (f"{ONE_STEP} --use_kl_loss --kl_estimator k2 --init_kl_coef 0.1", "update"),
        (f"{ONE_STEP} --init_kl_coef 0.1", "forward"),
        (f"{ONE_STEP} --max_epochs 2", "forward"),
        (f"{ONE_STEP} --skip_old_logprob never", "forward"),
        (f"{ONE_STEP} --max_epochs 2 --skip_old_logprob always", "engine"),
    ],
)
def test_where_old_logprobs_come_from(words, source):
    config = ppo(words)
    assert derived.old_logprobs(config) == source
    assert len(start_lines(config, "cuda")) == (source != "forward")
