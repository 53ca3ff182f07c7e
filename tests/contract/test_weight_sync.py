"""From a policy in DeepSpeed to several engines: what is sent, in how many calls, as what."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrl.agents.setup import AgentSetup
from openrl.cluster.group import LocalGroup, WorkerContext, WorkerDied
from openrl.config.groups.agent import AgentFlags, EnvironmentFlags
from openrl.config.groups.data import TemplateFlags
from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.reward import RewardFlags
from openrl.config.groups.rollout_engine import EngineFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import UserError
from openrl.rewards.build import RewardSetup
from openrl.trainer.rollout.engine_pool import EnginePool, EngineRepair
from openrl.training_engine.distributed import init_distributed
from openrl.types import Sampling
from openrl.weights.shared_memory import machine_id
from openrl.weights.transport import Route, SentBucket, SyncEndpoint
from openrl.workers.model_worker import ModelWorker
from openrl.workers.roles import Roles
from openrl.workers.rollout_worker import RolloutWorker
from openrl.workers.weight_sync import WeightSync
from tests.experience import engine_spec, optim_spec
from tests.loops import silent_progress
from tests.patience import PATIENCE
from tests.receivers import Receiving
from tests.tiny import rollout_spec, tiny_model_dir

TOKENS = [5, 9, 14, 7, 33, 21, 8, 60, 41, 12]
GREEDY = Sampling(8, temperature=0.0, ignore_eos=True)
MIB = 2**20


class Counted(LocalGroup):
    """Counts the calls to its workers."""

    calls: Counter[str]

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.calls[method] += 1
        return await super().call(method, *args, **kwargs)


class Threaded(LocalGroup):
    """Its workers have threads of their own, as they have processes elsewhere."""

    async def _send(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        return await asyncio.to_thread(getattr(self._workers[rank], method), *args)


@pytest.fixture(scope="module", autouse=True)
def alone():
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)


def policy_of(path: Path, lora: LoRAFlags | None = None) -> tuple[LocalGroup, ModelWorker]:
    worker = ModelWorker(WorkerContext("actor"), engine_spec(path, optim=optim_spec(), lora=lora))
    worker.start()
    return LocalGroup("actor", [worker]), worker


def engines_of(path: Path, count: int, backend: str = "hf", **fields: Any) -> Counted:
    spec = rollout_spec(path, param_dtype="fp32", longest=64, **fields)
    rewards = RewardSetup(RewardFlags(), reward_plan(RewardFlags()))
    agents = AgentSetup(AgentFlags(), EnvironmentFlags(), TemplateFlags())
    contexts = [WorkerContext("vllm", rank, count, rank) for rank in range(count)]
    workers = [RolloutWorker(c, backend, spec, agents, rewards) for c in contexts]
    group = Counted("vllm", workers)
    group.calls = Counter()
    return group


async def start(engines: LocalGroup) -> None:
    """Engines of transformers in one process take turns: it loads models by switching the process's
    default device."""
    for worker in engines._workers:
        await worker.start()
        if worker.backend == "hf":
            worker.engine._thread = engines._workers[0].engine._thread


def plain_logprobs(path: Path) -> torch.Tensor:
    """Of the greedy continuation of TOKENS, by plain forward passes."""
    model, ids, found = AutoModelForCausalLM.from_pretrained(path), [*TOKENS], []
    for _ in range(GREEDY.max_tokens):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        ids.append(int(logprobs.argmax()))
        found.append(logprobs.max())
    return torch.stack(found)


async def engine_logprobs(engines: LocalGroup) -> list[torch.Tensor]:
    replies = [await worker.engine.generate(TOKENS, GREEDY) for worker in engines._workers]
    return [torch.tensor(reply.logprobs) for reply in replies]


def test_two_engines_in_as_few_calls_as_the_bytes_need(tmp_path):
    """ceil(bytes / bucket) + 1 calls to each, whatever the tensors' sizes; then both are the
    policy."""
    path = tiny_model_dir(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    policy, worker = policy_of(path)
    engines = engines_of(path, 2)
    weight_sync = WeightSync(
        Roles(policy, engines), EngineFlags(sync_bucket_mb=1, check_weight_sync=True)
    )

    async def scenario():
        await start(engines)
        with torch.no_grad():
            for parameter in worker.engine.model.parameters():
                parameter.mul_(1.5)
        measured = [
            {name: m.value for name, m in (await weight_sync.sync()).items()} for _ in range(2)
        ]
        got = await engine_logprobs(engines)
        await engines.close()
        return measured, got

    measured, got = asyncio.run(scenario())
    worker.export(str(tmp_path / "out"))
    size = sum(
        tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values()
    )
    assert size > 4 * MIB and measured[0]["perf/sync_bytes"] == size
    for figures in measured:
        assert figures["perf/sync_rpcs"] <= math.ceil(size / MIB) + 1
        assert figures["perf/sync_seconds"] > 0
    assert engines.calls["load_bucket"] == 2 * (measured[0]["perf/sync_rpcs"] - 1)
    assert engines.calls["finish_sync"] == 2 and engines.calls["sync_endpoint"] == 1
    for logprobs in got:
        torch.testing.assert_close(logprobs, plain_logprobs(tmp_path / "out"), atol=1e-4, rtol=0)


def test_an_engine_that_fails_in_the_middle_is_named_and_all_keep_their_weights(tmp_path):
    path = tiny_model_dir(tmp_path)
    policy, worker = policy_of(path)
    with torch.no_grad():
        for parameter in worker.engine.model.parameters():
            parameter.mul_(1.5)
    engines = engines_of(path, 2)
    weight_sync = WeightSync(Roles(policy, engines), EngineFlags())

    async def scenario():
        await start(engines)
        engines._workers[1].engine.load_bucket = fail
        with pytest.raises(ConnectionError, match="no memory") as raised:
            await weight_sync.sync()
        versions = [worker.engine.policy_version for worker in engines._workers]
        got = await engine_logprobs(engines)
        await engines.close()
        return raised.value.__notes__, versions, got

    async def fail(sent):
        raise ConnectionError("no memory left")

    notes, versions, got = asyncio.run(scenario())
    assert notes == ["raised by vllm rank 1 in load_bucket"] and versions == [0, 0]
    for logprobs in got:
        torch.testing.assert_close(logprobs, plain_logprobs(path), atol=1e-4, rtol=0)


@pytest.mark.parametrize("before", ["host", "nccl"])
def test_an_engine_that_dies_is_left_out_and_served_when_it_is_back(tmp_path, before):
    """By way of host memory, and all engines from then on, whatever brought the weights before."""
    path = tiny_model_dir(tmp_path)
    policy, worker = policy_of(path)
    engines = engines_of(path, 2)
    weight_sync = WeightSync(Roles(policy, engines), EngineFlags())
    pool = EnginePool(engines, EngineRepair(1, weight_sync, silent_progress(1)))
    versions = []

    def versions_now():
        return [engine.engine.policy_version for engine in engines._workers]

    async def scenario():
        await start(engines)
        await weight_sync.sync()
        with torch.no_grad():
            for parameter in worker.engine.model.parameters():
                parameter.mul_(1.5)
        engines._workers[1].load_bucket = die
        await weight_sync.sync(pool.call_living)
        versions.append((versions_now(), [*pool.lost]))
        pool.lost.clear()
        del engines._workers[1].load_bucket
        weight_sync.route = replace(weight_sync.route, transport=before)
        await weight_sync.send_to_restarted([1])
        versions.append(versions_now())
        await weight_sync.sync(pool.call_living)
        versions.append(versions_now())
        got = await engine_logprobs(engines)
        await engines.close()
        return got

    async def die(sent):
        raise WorkerDied("it died", 1)

    got = asyncio.run(scenario())
    assert versions == [([2, 1], [1]), [2, 2], [3, 3]]
    worker.export(str(tmp_path / "out"))
    for logprobs in got:
        torch.testing.assert_close(logprobs, plain_logprobs(tmp_path / "out"), atol=1e-4, rtol=0)


class HoldingEngine:
    """An engine that only holds weights, in a process of its own."""

    def __init__(self, context: WorkerContext) -> None:
        self.rank, self.buckets, self.dies_at = context.rank, 0, 0  # 0: never

    async def start(self) -> None:
        self.holder = Receiving(torch.device("cpu"))
        assert await self.answer() == "up"

    async def answer(self) -> Any:
        try:
            found = await asyncio.to_thread(self.holder.answer)
        except (EOFError, OSError) as error:
            raise WorkerDied(f"vllm rank {self.rank} died", self.rank) from error
        if isinstance(found, Exception):
            raise found
        return found

    async def sync_endpoint(self) -> SyncEndpoint:
        return SyncEndpoint(machine_id(), (f"GPU {1 + self.rank}",))

    async def connect(self, route: Route, first_rank: int) -> None:
        self.holder.ask("connect", route, first_rank)
        await self.answer()

    async def load_bucket(self, sent: SentBucket) -> int:
        self.buckets += 1
        if self.buckets == self.dies_at:
            self.holder.kill()
        else:
            self.holder.ask("load", sent)
        await self.answer()
        return sent.nbytes

    async def finish_sync(self, version: int) -> int:
        return version

    async def close(self) -> None:
        self.holder.kill()


def test_an_engine_that_dies_in_a_broadcast_ends_the_run(tmp_path, monkeypatch):
    """Over gloo, killed where the others wait for it: the driver says who died, and does not wait
    for the others, which NCCL would keep in the broadcast."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = tiny_model_dir(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    _, worker = policy_of(path)
    worker.sync_endpoint = lambda: SyncEndpoint(machine_id(), ("GPU 0",))
    policy = Threaded("actor", [worker])
    engines = LocalGroup.create("vllm", 3, HoldingEngine)
    weight_sync = WeightSync(Roles(policy, engines), EngineFlags(sync_bucket_mb=1), timeout=60)
    pool = EnginePool(engines, EngineRepair(1, weight_sync, silent_progress(1)))

    async def scenario():
        await engines.call("start")
        await weight_sync.sync()
        assert weight_sync.route.transport == "nccl"
        dying = engines._workers[1]
        dying.dies_at = dying.buckets + 2
        with pytest.raises(WorkerDied, match="vllm rank 1 died"):
            await weight_sync.sync(pool.call_living)
        await engines.close()

    asyncio.run(scenario())
    assert not pool.lost and weight_sync.version == 1


def test_adapters_are_announced_as_peft_names_them(tmp_path):
    """The bytes of A and B alone, under the names of a file that peft reads."""
    _, worker = policy_of(tiny_model_dir(tmp_path), LoRAFlags(lora_rank=4, lora_alpha=8))
    config = worker.adapter_config()
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    worker.connect(Route(adapter=config))
    worker.begin_sync(1, MIB)
    sent = list(iter(worker.next_bucket, None))
    worker.export(str(tmp_path / "out"))
    stored = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert {name for one in sent for name in one.manifest.names} == stored.keys()
    assert sum(one.nbytes for one in sent) == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.full
def test_vllm_answers_with_each_adapter_that_is_synchronised(tmp_path):
    """Base and adapter side by side give what the merged model gives; three syncs, prefixes cached
    in between."""
    path = tiny_model_dir(tmp_path)
    policy, worker = policy_of(path, LoRAFlags(lora_rank=4, lora_alpha=8))
    engines = engines_of(path, 1, "vllm", adapter_rank=4, enable_prefix_caching=True)
    weight_sync = WeightSync(
        Roles(policy, engines), EngineFlags(check_weight_sync=True), adapter=True
    )

    async def scenario():
        await start(engines)
        found = []
        for version in (1, 2, 3):
            with torch.no_grad():
                for name, parameter in worker.engine.model.named_parameters():
                    if "lora_" in name:
                        parameter.normal_(std=0.2)
            figures = await weight_sync.sync()
            worker.export(str(tmp_path / str(version)))
            found.append((figures["perf/sync_bytes"].value, (await engine_logprobs(engines))[0]))
        with pytest.raises(UserError, match="does not take the adapter"):
            await engines._workers[0].engine._adapters.load({"peft_type": "LORA"}, [])
        kept = (await engine_logprobs(engines))[0]
        await engines.close()
        return found, kept

    found, kept = asyncio.run(scenario())
    whole = sum(
        tensor.nbytes for tensor in load_file(tmp_path / "3" / "model.safetensors").values()
    )
    for version, (sent, logprobs) in enumerate(found, 1):
        assert sent < whole / 3
        torch.testing.assert_close(
            logprobs, plain_logprobs(tmp_path / str(version)), atol=1e-4, rtol=0
        )
    torch.testing.assert_close(kept, found[-1][1], atol=1e-4, rtol=0)
    assert (found[0][1] - found[1][1]).abs().max() > 0.1
