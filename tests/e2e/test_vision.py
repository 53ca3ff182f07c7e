"""Images from the rows of a file to a trained model that another run starts from: train_sft, then
PPO with a critic and a reference."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from openrl.cli import train_dpo, train_rm
from openrl.cli.run import command
from openrl.config.commands import DPOConfig, RMConfig
from openrl.config.groups.inference import RewardModelFlags
from openrl.config.groups.model import LoadFlags
from openrl.config.groups.vision import ImageFlags, VisionFlags
from openrl.data.images import RowImages
from openrl.errors import UserError
from openrl.inference.scoring import load_reward_model
from openrl.models.causal_lm import Loading
from openrl.trace.reader import Trace
from openrl.trainer.launch import train
from openrl.trainer.planning.prepare import prepare
from openrl.vision.placing import unexpanded
from openrl.vision.processor import VisionProcessor, media_tokens
from tests.e2e.bench import in_this_process, without_ray
from tests.e2e.runs import REWARD, metrics, played, ppo_flags, run, run_here
from tests.flags import ppo
from tests.tiny import tiny_reward_model_dir
from tests.tiny_vision import picture, tiny_vision_dir

pytestmark = pytest.mark.full


VISION = {"apply_chat_template": True, "max_images_per_prompt": 2, "image_max_pixels": 4800}
COLUMNS = {"input_key": "problem", "label_key": "answer"}
LENGTHS = {"prompt_max_len": 128, "generate_max_len": 6}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A model, and rows as EasyR1's parquet files have them: with two images, one and none."""
    folder = tmp_path_factory.mktemp("task")
    tiny_vision_dir(folder).rename(folder / "model")
    rows = [
        {
            "problem": "<image>" * (n % 3) + "how many?",
            "images": [picture(n + i, (90, 70)) for i in range(n % 3)],
            "answer": str(n % 3),
        }
        for n in range(24)
    ]
    kinds = Features(
        {"problem": Value("string"), "images": List(ImageFeature()), "answer": Value("string")}
    )
    Dataset.from_list(rows, features=kinds).to_parquet(folder / "rows.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def supervised_flags(task: Path, out: Path, **others: object) -> list[str]:
    flags = {
        "pretrain": task / "model",
        "dataset": task / "rows.parquet",
        "input_key": "problem",
        "output_key": "answer",
        "max_len": 160,
        "max_steps": 2,
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "learning_rate": 1e-3,
        "param_dtype": "fp32",
        "device": "cpu",
        "save_path": out,
        "ckpt_path": out / "checkpoints",
        "max_images_per_prompt": 2,
    } | others
    given = {name: value for name, value in flags.items() if value is not None}
    return [word for n, v in given.items() for word in (f"--{n}", str(v))] + [
        "--apply_chat_template"
    ]


@pytest.fixture(scope="module")
def supervised(task, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sft")
    output = run("train_sft", supervised_flags(task, out))
    assert "no tokens are left" not in output
    return out


def test_ppo_on_images_from_a_model_that_was_trained_on_images(task, supervised, tmp_path):
    words = ppo_flags(
        task,
        tmp_path,
        pretrain=supervised,
        prompt_data=task / "rows.parquet",
        advantage_estimator="gae",
        use_kl_loss=True,
        kl_estimator="k3",
        max_steps=3,
        zero_stage=2,
        packing_samples=True,
        rollout_backend="hf",
        **VISION,
        **COLUMNS,
        **LENGTHS,
    )
    config = ppo(" ".join(words))
    inputs = prepare(config)
    assert "24 images, at most" in inputs.reports[0]
    asyncio.run(train(config, inputs, in_this_process))
    steps = metrics(tmp_path)
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert all(math.isfinite(m["actor/policy_loss"]) for m in steps)
    assert all(m["rollout/images"] > 0 and m["actor/encoder_seconds"] > 0 for m in steps)
    before, after = (load_file(folder / "model.safetensors") for folder in (supervised, tmp_path))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("vision_model" in name for name in changed)
    assert any("text_model" in name for name in changed)
    assert (tmp_path / "processor_config.json").is_file()


def test_a_teacher_that_is_told_more_sees_the_images(task, tmp_path):
    """The policy with the answer before its prompt teaches itself: the distance that the run
    reports is that of the model behind the processor, which places the images anew."""
    flags = {
        "pretrain": task / "model",
        "prompt_data": task / "rows.parquet",
        "input_key": "problem",
        "remote_rm_url": None,
        "label_key": None,
        "advantage_estimator": "reinforce",
        "init_kl_coef": 0,
        "teacher_self": 1,
        "teacher_prompt_key": "answer",
        "rollout_backend": "hf",
        "max_steps": 1,
        "trace_sample_rate": 1,
    }
    limits = {"prompt_max_len": 192, "generate_max_len": 6}
    shown = VISION | {"image_max_pixels": None}
    words = ppo_flags(task, tmp_path, **flags | limits | shown)
    assert run_here(words, without_ray) == 0
    model = AutoModelForImageTextToText.from_pretrained(task / "model").eval()
    processor = AutoProcessor.from_pretrained(task / "model")

    def logprobs(text, images, answer):
        seen = processor(text=[text], images=images or None, return_tensors="pt")
        ids = torch.cat([seen.pop("input_ids"), torch.tensor([answer])], 1)
        seen["attention_mask"] = torch.ones_like(ids)
        with torch.no_grad():
            logits = model(input_ids=ids, **seen).logits[0, :-1]
        logits[:, list(media_tokens(model.config))] = -math.inf  # which a policy never samples
        return logits.log_softmax(-1)[range(len(ids[0]) - 1), ids[0, 1:]][-len(answer) :]

    gaps, counts = [], set()
    for answer in played(tmp_path):
        (segment,) = answer["segments"]
        first = segment["loss_mask"].index(True)
        row = int(answer["prompt_id"].split(":")[-1])
        images = [picture(row + i, (90, 70)) for i in range(row % 3)]
        text = "<image>" * (row % 3) + "how many?<eos>a:"
        mine = logprobs(f"u:{text}", images, segment["token_ids"][first:])
        torch.testing.assert_close(
            mine, torch.tensor(segment["old_logprobs"][first:]), atol=1e-4, rtol=0
        )
        theirs = logprobs(f"u:{row % 3}\n\n{text}", images, segment["token_ids"][first:])
        gaps.append(mine - theirs)
        counts.add(len(images))
    assert counts == {0, 1, 2}
    (step,) = metrics(tmp_path)
    expected = torch.cat(gaps).mean().item()
    assert abs(expected) > 1e-3
    assert step["actor/teacher_kl"] == pytest.approx(expected, abs=1e-5)


def test_images_cross_processes(ray_address, task, supervised, tmp_path, capsys):
    """Ray, vLLM, and two ranks that see different images; nothing of them is lost or mistaken on
    the way, or the engine's log-probs would not be the trainer's."""
    flags = ppo_flags(
        task,
        tmp_path,
        ray_address=ray_address,
        pretrain=supervised,
        prompt_data=task / "rows.parquet",
        actor_num_gpus_per_node=2,
        zero_stage=2,
        packing_samples=True,
        max_steps=2,
        **VISION,
        **COLUMNS,
        **LENGTHS,
    )
    assert run_here(flags) == 0
    assert "24 images, at most" in capsys.readouterr().out
    steps = metrics(tmp_path)
    assert [m["step"] for m in steps] == [1, 2]
    assert all(m["rollout/images"] > 0 and m["rollout/image_tokens"] > 4 for m in steps)
    assert all(m["actor/logprob_gap_max"] < 1e-4 for m in steps)
    before, after = (load_file(folder / "model.safetensors") for folder in (supervised, tmp_path))
    assert before.keys() == after.keys()
    assert any(
        "vision_model" in name for name in before if not torch.equal(before[name], after[name])
    )


PAIRS = {
    "input_key": None,
    "output_key": None,
    "prompt_key": "problem",
    "chosen_key": "answer",
    "rejected_key": "wrong",
    "train_batch_size": 24,
    "max_steps": 30,
}


@pytest.fixture(scope="module")
def pairs(task) -> Path:
    """Rows of which the image alone says what is right."""
    rows = [
        {"problem": "<image>", "images": [picture(n % 2)], "answer": said, "wrong": other}
        for n in range(24)
        for said, other in [("ab"[n % 2], "ba"[n % 2])]
    ]
    kinds = Features(
        {"problem": Value("string"), "images": List(ImageFeature())}
        | {"answer": Value("string"), "wrong": Value("string")}
    )
    Dataset.from_list(rows, features=kinds).to_parquet(task / "pairs.parquet")
    return task / "pairs.parquet"


@pytest.fixture(scope="module")
def reward_model(task, pairs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rm")
    words = supervised_flags(task, out, **PAIRS, dataset=pairs, eval_dataset=pairs)
    assert command(RMConfig, train_rm.prepare, train_rm.run, argv=words) == 0
    return out


def test_a_reward_model_learns_what_the_image_alone_says(reward_model):
    assert metrics(reward_model)[-1]["accuracy"] == 1.0
    assert json.loads((reward_model / "config.json").read_text())["std"] > 0
    assert (reward_model / "processor_config.json").is_file()


def test_a_reward_model_that_sees_judges_what_the_policy_sees(reward_model, pairs, task, tmp_path):
    """Its rewards of the rollouts are those of the server that shows them to it."""
    words = ppo_flags(
        task,
        tmp_path,
        pretrain=task / "model",
        prompt_data=pairs,
        label_key="answer",
        input_key="problem",
        remote_rm_url=None,
        reward_pretrain=reward_model,
        prompt_max_len=64,
        generate_max_len=2,
        max_steps=1,
        rollout_backend="hf",
        rollout_dump_dir=tmp_path / "rollouts",
        **VISION,
    )
    config = ppo(" ".join(words))
    inputs = prepare(config)
    asyncio.run(train(config, inputs, in_this_process))
    taken = Trace(tmp_path / "rollouts").replay(1, inputs.prompts)
    processor = VisionProcessor(str(reward_model), {})
    loading = Loading(
        LoadFlags(param_dtype="fp32"), "cpu", vision=VisionFlags(max_images_per_prompt=2)
    )
    images = RowImages(ImageFlags(max_images_per_prompt=2), processor)
    server = load_reward_model(str(reward_model), RewardModelFlags(), loading, images=images)
    tokenizer, compared = processor.processor.tokenizer, 0
    for trajectory in (t for group in taken.groups for t in group.trajectories):
        (row,) = trajectory.segments
        ids = unexpanded(row.token_ids, row.images)
        text = tokenizer.decode(ids)
        if tokenizer(text, add_special_tokens=False).input_ids != ids:
            continue  # no text has these tokens
        (scalar,) = server([text], [[placed.image.data for placed in row.images]])
        assert trajectory.score.reward == pytest.approx(scalar.value, abs=1e-4)
        compared += 1
    assert compared >= 8


def test_dpo_learns_what_the_image_alone_says(task, pairs, tmp_path):
    words = supervised_flags(task, tmp_path, **PAIRS, dataset=pairs)
    assert command(DPOConfig, train_dpo.prepare, train_dpo.run, argv=words) == 0
    assert metrics(tmp_path)[-1]["accuracy"] == 1.0


def test_a_reward_model_that_reads_text_is_refused_before_the_start(task, tmp_path):
    words = ppo_flags(
        task,
        tmp_path / "out",
        prompt_data=task / "rows.parquet",
        label_key="answer",
        input_key="problem",
        prompt_max_len=128,
        remote_rm_url=None,
        reward_pretrain=tiny_reward_model_dir(tmp_path),
        **VISION,
    )
    with pytest.raises(UserError, match="reads only text, but prompts have images"):
        prepare(ppo(" ".join(words)))
