"""Engines that forget their weights when they sleep: parts come and go as vLLM lets them, and
nobody answers with nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from openrl.cluster.group import LocalGroup
from openrl.config.groups.placement import ENGINES
from openrl.rollout_engines.vllm_engine import TAGS, VLLMEngine
from openrl.trainer.launch import build_weight_sync
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import FinishReason, Prompt, PromptGroup, Sampling, Segment, Trajectory
from openrl.weights.transport import Route
from openrl.workers.residency import Residency, ResidencyTable
from openrl.workers.roles import assign_roles, sleep_parts
from openrl.workers.rollout_worker import RolloutRequest
from tests.flags import GRPO, ppo
from tests.tiny import rollout_spec
from tests.unit.workers.test_residency import plan

PROMPT = Prompt("p", [5], "x")


class LLM:
    """vLLM's rules of sleep: as a whole, from fully awake alone before 0.32; tag by tag back,
    without content at level 2."""

    def __init__(self, by_parts: bool) -> None:
        self.asleep: set[str] = set()
        self.content = True
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 32)
        if by_parts:
            self.release_kv_cache_memory = None  # what tells the versions apart

    async def reset_prefix_cache(self) -> bool:
        return True

    async def sleep(self, level: int) -> None:
        if "weights" in self.asleep or (
            self.asleep and not hasattr(self, "release_kv_cache_memory")
        ):
            return  # "Executor is already sleeping": a warning, and nothing happens
        self.content &= level == 1
        self.asleep = {*TAGS.values()}

    async def wake_up(self, tags: list[str]) -> None:
        if self.asleep >= {*tags}:
            self.asleep -= {*tags}

    async def collective_rpc(self, method: str, args: tuple) -> list[dict[str, list[str]]]:
        assert method == "openrl_load_weights" and "weights" not in self.asleep
        self.content = True
        return [{"lost": [], "changed": [], "absent": []}]


class Engine(VLLMEngine):
    """The real engine, whose weights are the version sent last."""

    def __init__(self, context, llm: LLM, level: int, log: list[str]) -> None:
        super().__init__(rollout_spec("model", device="cuda", sleep_level=level), llm, None)
        self.log = log

    async def _while_alive(self, work):
        return await work

    async def finish_sync(self, version: int) -> int:
        self.log.append(f"send {version}")
        return await super().finish_sync(version)

    async def play(self, prompt, request):
        self._require_all("a request")
        assert not self._llm.asleep and self._llm.content
        self.log.append(f"answer by {self.policy_version}")
        return PromptGroup(
            prompt, [Trajectory(prompt, [Segment.answer([5], [6], [-1.0])], FinishReason.STOP)]
        )


class Model:
    """Parts that come and go, and checkpoints, without content."""

    def __init__(self, context) -> None:
        pass

    def sleep(self, *parts) -> None:
        pass

    wake = sleep

    def save(self, directory, parts) -> None:
        pass


class Policy(Model):
    """Sends nothing in no bucket."""

    def begin_sync(self, version, size):
        pass

    def next_bucket(self):
        return None

    def empty_cache(self) -> None:
        pass

    def end_sync(self) -> None:
        pass


@pytest.mark.parametrize("by_parts", [True, False])
@pytest.mark.parametrize(("level", "again"), [(1, 0), (2, 2)])
def test_answers_come_from_weights_that_were_sent(tmp_path, by_parts, level, again):
    """Step by step: sent, answered, trained; with a pass after the first answers and a checkpoint
    before the third."""
    words = (
        f"{GRPO} --init_kl_coef 0 --colocate_all_models --actor_num_gpus_per_node 1 --save_path"
        f" {tmp_path}"
    )
    config = ppo(f"{words} --vllm_enable_sleep --vllm_sleep_level {level} --deepspeed_enable_sleep")
    log: list[str] = []

    async def scenario():
        groups = {ENGINES: LocalGroup.create(ENGINES, 1, Engine, LLM(by_parts), level, log)}
        groups["actor"] = LocalGroup.create("actor", 1, Policy)
        residency = Residency(ResidencyTable.of(plan(vllm=(0,), actor=(0,)), sleep_parts(config)))
        for role, group in groups.items():
            await residency.started(role, group)
        roles = assign_roles(config, groups, residency)
        weight_sync = build_weight_sync(config, roles)
        weight_sync.route = Route()
        buffer = RolloutBuffer(None, BufferLimits(1))
        request = RolloutRequest(1, Sampling(4), scored=False)
        rollouts = Rollouts(EnginePool(roles.engines), buffer, residency, request)

        async def answer():
            await weight_sync.resend_if_dropped()
            async with rollouts.generating():
                await rollouts.play_all([PROMPT], request, lambda done, total: None)

        async def train():
            async with residency.stage("train", "actor"):
                log.append("train")
            return await weight_sync.sync()

        measured = [await weight_sync.sync()]
        await answer()
        async with residency.stage("forward", "actor"):
            log.append("compare")
        await answer()
        measured.append(await train())
        async with residency.stage("save", "actor"):
            pass
        await answer()
        await answer()
        measured.append(await train())
        return [m["sync/resent"].value if "sync/resent" in m else 0 for m in measured]

    resent = asyncio.run(scenario())
    once_more = [["send 1"], ["send 2"]] if again else [[], []]
    assert log == [
        "send 1", "answer by 1", "compare", *once_more[0], "answer by 1", "train", "send 2",
        *once_more[1], "answer by 2", "answer by 2", "train", "send 3",
    ]  # fmt: skip
    assert resent == [0, again // 2, again // 2]


def test_an_engine_that_forgot_refuses_until_it_is_sent_everything():
    async def scenario():
        engine = Engine(None, LLM(by_parts=True), 2, [])
        await engine.sleep("weights", "cache")
        with pytest.raises(RuntimeError, match="a request needs weights and cache"):
            engine._require_all("a request")
        await engine.wake("weights", "cache")
        with pytest.raises(
            RuntimeError, match="dropped its weights when it slept, and none were sent since"
        ):
            engine._require_all("a request")
        await engine.finish_sync(1)
        engine._require_all("a request")

    asyncio.run(scenario())
