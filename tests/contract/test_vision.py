"""Rows of the data with no, one and two images, played by real engines and trained: what engines
say of their tokens is what the trainer says, before and after a step."""

from __future__ import annotations

import asyncio
import shlex
import sys
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from openrl.agents.setup import AgentSetup
from openrl.algorithms.batching import plan_steps
from openrl.algorithms.collate import collate
from openrl.cluster.group import LocalGroup, WorkerContext
from openrl.config.groups.agent import AgentFlags, EnvironmentTagFlags
from openrl.config.groups.data import PromptDataFlags, TemplateFlags
from openrl.config.groups.model import LoadFlags
from openrl.config.groups.reward import RewardFlags
from openrl.config.groups.rollout_engine import EngineFlags
from openrl.config.groups.vision import VisionFlags
from openrl.config.reward_plan import reward_plan
from openrl.data.images import RowImages
from openrl.data.loading import RowSource
from openrl.data.prompts import PromptBuilder
from openrl.data.tokenizer import load_tokenizer
from openrl.experience import ExperienceBatch, StepPlan
from openrl.models.towers import tower_parameters
from openrl.rewards.build import RewardSetup
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.updates import SupervisedUpdate
from openrl.types import FinishReason, Prompt, PromptGroup, Sampling, Segment, Trajectory
from openrl.vision.processor import VisionProcessor
from openrl.vision.travel import with_pixels
from openrl.workers.model_worker import ModelWorker
from openrl.workers.roles import Roles
from openrl.workers.rollout_worker import RolloutRequest, RolloutWorker
from openrl.workers.weight_sync import WeightSync
from tests.experience import counts_of, engine_spec, optim_spec
from tests.patience import PATIENCE
from tests.tiny import PAD, rollout_spec
from tests.tiny_vision import ARCHITECTURES, picture, png, tiny_vision_dir

pytestmark = pytest.mark.full

CLOSE = 1e-5
TRAINED = VisionFlags(max_images_per_prompt=2)
FROZEN = VisionFlags(max_images_per_prompt=2, freeze_visual_encoder=True)
CHAT = TemplateFlags(apply_chat_template=True)
ALONE = AgentSetup(AgentFlags(), EnvironmentTagFlags(), TemplateFlags())
ROWS = [
    {"input": "nothing to see", "images": []},
    {"input": "<image>what is it", "images": [png(picture(1))]},
    {"input": "first <image> and <image>", "images": [png(picture(2, (30, 90))), png(picture(3))]},
]


@pytest.fixture(scope="module", autouse=True)
def alone():
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_vision_dir(tmp_path_factory.mktemp("m")))


@pytest.fixture(scope="module")
def prompts(checkpoint) -> list[Prompt]:
    return prompts_of(checkpoint)


def prompts_of(checkpoint: str) -> list[Prompt]:
    images = RowImages(TRAINED, VisionProcessor(checkpoint, {}))
    builder = PromptBuilder(
        PromptDataFlags(), CHAT, load_tokenizer(checkpoint, LoadFlags()), 256, images=images
    )
    source = RowSource("rows", "rows", Dataset.from_list(ROWS))
    (found,), (report,) = builder.build([source], flag="prompt_data", kind="train")
    assert [len(p.images) for p in found] == [0, 1, 2]
    assert "3 images" in report
    return found


def policy_of(path: str, vision: VisionFlags, packing: bool) -> tuple[LocalGroup, ModelWorker]:
    spec = engine_spec(path, optim=optim_spec(), vision=vision, packing=packing)
    worker = ModelWorker(WorkerContext("actor"), spec)
    worker.start()
    return LocalGroup("actor", [worker]), worker


def engines_of(
    path: str, backend: str, agents: AgentSetup = ALONE, max_images: int = 2
) -> LocalGroup:
    spec = rollout_spec(
        path,
        param_dtype="fp32",
        longest=256,
        max_images_per_prompt=max_images,
        enable_prefix_caching=True,
    )
    rewards = RewardSetup(RewardFlags(), reward_plan(RewardFlags()))
    worker = RolloutWorker(WorkerContext("vllm"), backend, spec, agents, rewards)
    return LocalGroup("vllm", [worker])


def gap(worker: ModelWorker, groups) -> float:
    """The larger of engine's and trainer's to the trainer's weights in fp64: to each other, their
    roundings add up. The root mean square over the sampled tokens shows a single token that is off
    by 1e-4; the largest gap also depends on the processor, from 6e-6 to 1.1e-5."""
    batch = collate(groups, PAD)
    rows, mask = list(range(len(batch))), batch.loss_mask
    assert int(mask.sum()) > 40
    ours, trained = columns_of(worker, batch, rows), worker.engine._engine
    worker.engine._engine = deepcopy(worker.engine.model).double()
    exact = columns_of(worker, batch, rows)
    worker.engine._engine = trained
    both = (ours, batch.rollout_logprobs)
    return max(float((found - exact)[mask].square().mean().sqrt()) for found in both)


def columns_of(worker: ModelWorker, batch: ExperienceBatch, rows: list[int]) -> torch.Tensor:
    return worker.forward(batch, [rows[:3], rows[3:]])["output"]


@pytest.mark.parametrize("vision", [TRAINED, FROZEN], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("backend", "arch"),
    [*(("vllm", arch) for arch in ARCHITECTURES if arch != "gemma3"), ("hf", "idefics3")],
)
def test_engine_and_trainer_agree_before_and_after_steps(tmp_path, backend, arch, vision):
    checkpoint = str(tiny_vision_dir(tmp_path, arch=arch))
    prompts = prompts_of(checkpoint)
    agree(checkpoint, prompts, backend, vision)


def agree(checkpoint: str, prompts: list[Prompt], backend: str, vision: VisionFlags) -> None:
    frozen = vision.freeze_visual_encoder
    policy, worker = policy_of(checkpoint, vision, packing=backend == "vllm")
    engines = engines_of(checkpoint, backend)
    flags = EngineFlags(check_weight_sync=True)
    weight_sync = WeightSync(Roles(policy, engines), flags, keeps_tower=frozen)
    names = {*tower_parameters(worker.engine.model.hf)}
    tower = [p for name, p in worker.engine.model.hf.named_parameters() if name in names]
    before = [p.detach().clone() for p in tower]
    sampling = Sampling(12, ignore_eos=True)

    async def play(step: int):
        (player,) = engines._workers
        request = [
            RolloutRequest(2, sampling, seed=(1, step, n), scored=False)
            for n in range(len(prompts))
        ]
        played = await asyncio.gather(
            *(player.play(p, r) for p, r in zip(prompts, request, strict=True))
        )
        return [with_pixels(group, p) for group, p in zip(played, prompts, strict=True)]

    async def scenario():
        await engines.call("start")
        gaps = []
        for step in range(3):
            sent = (await weight_sync.sync())["perf/sync_bytes"].value
            groups = await play(step)
            gaps.append(gap(worker, groups))
            batch = collate(groups, PAD)
            plan = plan_steps(batch, 1, 6, 3)
            shard = batch.select(plan.shards[0])
            plans = [ranks[0] for ranks in plan.steps]
            worker.begin_update((shard, plans, SupervisedUpdate()))
            worker.advance(sum(len(step.micro_batches) for step in plans))
        await engines.close()
        return gaps, sent

    gaps, sent = asyncio.run(scenario())
    assert max(gaps) < CLOSE, gaps
    changed = any(not torch.equal(a, b) for a, b in zip(before, tower, strict=True))
    assert changed != frozen
    everything = sum(p.numel() * 4 for p in worker.engine.model.parameters())
    assert (sent < everything) == frozen


@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_engine_and_trainer_agree_on_what_an_environment_shows(checkpoint, tmp_path, backend):
    """Three rounds of a game, each shown as a picture: all turns of a row see all of them."""
    settings = tmp_path / "environments.yaml"
    settings.write_text("number_game: {pictures: true, max_steps: 3, instruction: ''}\n")
    tags = EnvironmentTagFlags(env_tags=["number_game"], env_config=str(settings))
    vision = VisionFlags(max_images_per_prompt=4)
    agents = AgentSetup(AgentFlags(max_tokens_per_turn=8), tags, CHAT, vision)
    policy, worker = policy_of(checkpoint, vision, packing=True)
    engines = engines_of(checkpoint, backend, agents, max_images=4)
    weight_sync = WeightSync(Roles(policy, engines), EngineFlags(check_weight_sync=True))
    seeds = [Prompt(f"s:{n}", [], "", source="number_game", meta={"seed": n}) for n in range(3)]

    async def scenario():
        await engines.call("start")
        await weight_sync.sync()
        (player,) = engines._workers
        asked = RolloutRequest(2, Sampling(150, ignore_eos=True), seed=(1, 0, 0), scored=False)
        played = [await player.play(seed, asked) for seed in seeds]
        await engines.close()
        return [with_pixels(group, seed) for group, seed in zip(played, seeds, strict=True)]

    groups = asyncio.run(scenario())
    last = [t.segments[-1] for g in groups for t in g.trajectories]  # a turn may begin a row anew
    assert [len(row.images) for row in last] == [3] * len(last)
    assert gap(worker, groups) < CLOSE


def rows_in(groups: list[PromptGroup]) -> list[Segment]:
    played = [trajectory for group in groups for trajectory in group.trajectories]
    assert [trajectory.failure for trajectory in played] == [None] * len(played)
    return [row for trajectory in played for row in trajectory.segments]


EXECUTOR = """
class AgentExecutor:
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        said = (await llm_engine.generate(tokens, sampling_params)).outputs[0].token_ids
        return {
            "observation_tokens": tokens + said,
            "action_ranges": [(len(tokens), len(tokens) + len(said))],
            "reward": float(len(images or [])),
        }
"""
PROGRAM = """
import json, os, urllib.request
body = json.dumps({"messages": json.load(open(os.environ["OPENRL_MESSAGES_FILE"]))}).encode()
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
urllib.request.urlopen(request, timeout=60)
"""


def test_agents_of_others_leave_the_rows_of_ours(checkpoint, prompts, tmp_path):
    """The policy answering once, an executor of a file and a program that speaks to the endpoint:
    the same tokens, images and log-probs, and they are the trainer's."""
    executor, program = tmp_path / "executor.py", tmp_path / "program.py"
    executor.write_text(EXECUTOR)
    program.write_text(PROGRAM)
    policy, worker = policy_of(checkpoint, TRAINED, packing=True)

    async def played(agents: AgentFlags) -> list[PromptGroup]:
        setup = AgentSetup(agents, EnvironmentTagFlags(), CHAT, TRAINED)
        engines = engines_of(checkpoint, "hf", setup)
        weight_sync = WeightSync(Roles(policy, engines), EngineFlags(check_weight_sync=True))
        await engines.call("start")
        await weight_sync.sync()
        (player,) = engines._workers
        asked = RolloutRequest(2, Sampling(12, ignore_eos=True), seed=(1, 0, 0), scored=False)
        groups = [await player.play(prompt, asked) for prompt in prompts]
        await engines.close()
        return [with_pixels(group, p) for group, p in zip(groups, prompts, strict=True)]

    command = shlex.join([sys.executable, str(program)])
    ours, files, programs = (
        asyncio.run(played(flags))
        for flags in (
            AgentFlags(),
            AgentFlags(agent_func_path=str(executor)),
            AgentFlags(agent_command=command),
        )
    )
    rows = rows_in(ours)
    for groups in (files, programs):
        for row, theirs in zip(rows, rows_in(groups), strict=True):
            assert (theirs.token_ids, theirs.loss_mask) == (row.token_ids, row.loss_mask)
            assert (theirs.images, theirs.versions) == (row.images, row.versions)
            pixels = [placed.image.data for placed in row.images]
            assert [placed.image.data for placed in theirs.images] == pixels
            assert theirs.rollout_logprobs == pytest.approx(row.rollout_logprobs, abs=CLOSE)
    assert [t.score.reward for g in files for t in g.trajectories] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    for groups in (ours, files, programs):
        assert gap(worker, groups) < CLOSE


def test_a_prompt_is_not_what_it_is_without_its_image(checkpoint, prompts):
    """The engine looks: another image, other log-probs."""
    engines = engines_of(checkpoint, "hf")
    (worker,) = engines._workers
    other = replace(prompts[1].images[0], image=prompts[2].images[1].image)

    async def scenario():
        await worker.start()
        found = [
            await worker.engine.generate(prompts[1].token_ids, Sampling(1, 0.0), [image])
            for image in (prompts[1].images[0], other)
        ]
        await engines.close()
        return found

    own, shown = asyncio.run(scenario())
    assert abs(own.logprobs[0] - shown.logprobs[0]) > 1e-3


def test_zero_stages_train_the_same_with_and_without_images(checkpoint, prompts):
    """Micro-batches with images and without follow each other; stage 3 gathers the tower either
    way."""
    g = torch.Generator().manual_seed(0)
    answers = torch.randint(20, 60, (6, 5), generator=g).tolist()
    rows = [
        Trajectory(p, [Segment.answer(p.token_ids, answer, images=p.images)], FinishReason.STOP)
        for p, answer in zip([*prompts, *prompts], answers, strict=True)
    ]
    batch = collate([PromptGroup(t.prompt, [t]) for t in rows], PAD)
    found = []
    for stage in (0, 2, 3):
        worker = ModelWorker(
            WorkerContext("actor"),
            engine_spec(
                checkpoint,
                optim=optim_spec(),
                vision=TRAINED,
                zero_stage=stage,
                packing=True,
                gradient_checkpointing=stage == 3,
            ),
        )
        worker.start()
        for _ in range(3):
            worker.engine.train_step(
                batch, StepPlan([[0], [1, 2, 3], [4, 5]], counts_of(batch)), SupervisedUpdate()
            )
        found.append(worker.forward(batch, [[0, 3], [1, 2, 4, 5]])["output"][batch.loss_mask])
    for column in found[1:]:
        torch.testing.assert_close(column, found[0], rtol=0, atol=1e-3)
