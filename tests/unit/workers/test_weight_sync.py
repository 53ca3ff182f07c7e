"""The order of calls in a weight sync."""

import asyncio

from openrl.cluster.group import LocalGroup
from openrl.config.groups.rollout_engine import EngineFlags
from openrl.weights.buckets import WeightManifest
from openrl.weights.transport import Route, SentBucket
from openrl.workers.roles import Roles
from openrl.workers.weight_sync import WeightSync
from tests.patience import PATIENCE

BUCKETS = [SentBucket(WeightManifest(1, (name,), ("float32",), ((2,),)), {}) for name in "abc"]


class Policy:
    """Delivers a bucket when it is asked for the next one, as in a broadcast."""

    def __init__(self):
        self.left, self.announced = [], None
        self.delivered = {id(bucket): asyncio.Event() for bucket in BUCKETS}

    async def begin_sync(self, version, size):
        self.left = [*BUCKETS]

    async def next_bucket(self):
        if self.announced is not None:
            self.delivered[id(self.announced)].set()
        self.announced = self.left.pop(0) if self.left else None
        return self.announced

    async def end_sync(self):
        assert all(event.is_set() for event in self.delivered.values())


class Engine:
    def __init__(self, policy):
        self.policy, self.loaded = policy, []

    async def load_bucket(self, sent):
        await self.policy.delivered[id(sent)].wait()
        self.loaded += sent.manifest.names
        return sent.nbytes

    async def finish_sync(self, version):
        return version


def test_engines_load_a_bucket_while_the_policy_delivers_it_and_packs_the_next():
    async def scenario():
        policy = Policy()
        engines = [Engine(policy), Engine(policy)]
        roles = Roles(LocalGroup("actor", [policy]), LocalGroup("vllm", engines))
        weight_sync = WeightSync(roles, EngineFlags())
        weight_sync.route = Route()
        async with asyncio.timeout(PATIENCE):  # or each end waits for the other for ever
            measured = await weight_sync.sync()
        return [engine.loaded for engine in engines], measured

    loaded, measured = asyncio.run(scenario())
    assert loaded == [["a", "b", "c"]] * 2
    assert measured["perf/sync_bytes"].value == 3 * 8 and measured["perf/sync_rpcs"].value == 4
