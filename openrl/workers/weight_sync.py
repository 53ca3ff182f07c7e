"""Sends the policy's weights to all engines: agrees on a route once, sends the weights at each
sync, and keeps track of the policy version that the engines hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from openrl.cluster.group import gather_ranks
from openrl.config.groups.placement import ENGINES
from openrl.config.groups.rollout_engine import EngineFlags
from openrl.metrics import Last, Metric, Sum
from openrl.waiting import all_or_first_error
from openrl.weights.transport import WORDS, Route, SyncEndpoint, choose_transport, fallback_warning
from openrl.workers.roles import Roles

CallEngines = Callable[..., Coroutine[Any, Any, list[Any]]]
"""Calls a method by its name, with its arguments, on some engines; returns their answers."""


class WeightSync:
    """Mediates between the ranks of the policy and the engines. It runs on the driver, which only
    forwards announcements and never sees a weight."""

    def __init__(
        self,
        roles: Roles,
        flags: EngineFlags,
        *,
        adapter: bool = False,
        timeout: int = 3600,
        engines_forget: bool = False,
        keeps_tower: bool = False,
    ) -> None:
        """``adapter``: send only adapters. ``timeout``: seconds that processes wait for each other.
        ``engines_forget``: engines drop their weights when they sleep. ``keeps_tower``: the vision
        tower is neither trained nor sent."""
        self.policy, self.engines, self.residency = roles.policy, roles.engines, roles.residency
        self.flags, self.adapter, self.timeout = flags, adapter, timeout
        self.engines_forget, self.keeps_tower = engines_forget, keeps_tower
        self.route: Route | None = None
        self.version = 0
        self._resent = 0

    async def sync(self, call_living: CallEngines | None = None) -> dict[str, Metric]:
        """Send the policy's weights to all engines as the next version. Returns metrics of the
        transfer.

        ``call_living`` calls engines and leaves out those that die. Without it a death is raised as
        WorkerDied, and so it is in a broadcast, which needs every engine. Where rollouts are
        replayed there is no engine, and only the version counts."""
        if not self.engines.size:
            self.version += 1
            return {}
        broadcasts = self.route is not None and self.route.transport == "nccl"
        call = self.engines.call if call_living is None or broadcasts else call_living
        measured = await self._send(self.version + 1, call)
        self.version += 1
        again, self._resent = self._resent, 0
        return measured | ({"sync/resent": Sum(float(again))} if again else {})

    async def resend_if_dropped(self) -> None:
        """Send the weights again, as the same version, if the engines dropped them when they slept.
        That happens if something else needs the GPUs between a sync and the next answers, such as a
        checkpoint or the check after the first sync."""
        if self.engines_forget and self.residency.sleeps(ENGINES, "weights"):
            await self._send(self.version, self.engines.call)
            self._resent += 1

    async def send_to_restarted(self, ranks: Sequence[int]) -> None:
        """Send the weights, as the current version, to engines that have just been restarted, while
        the others continue. From then on all weights go through host memory, since a broadcast
        group, for one, has lost members. No engine may be dead."""

        async def call(method: str, *args: Any) -> list[Any]:
            return await all_or_first_error(
                self.engines.call_one(rank, method, *args) for rank in ranks
            )

        assert self.route is not None, "engines die after the first sync"
        if self.route.transport == "host":
            await call("connect", self.route, 0)
        else:
            self.route = replace(self.route, transport="host")
            await self.policy.call("connect", self.route)
            await self.engines.call("connect", self.route, 0)
        await self._send(self.version, call)

    def notes(self) -> list[str]:
        """Say how weights travel, with a warning if the requested transport is not used. Known from
        the first sync on."""
        if not self.engines.size:
            return ["weights travel nowhere: rollouts are replayed"]
        assert self.route is not None
        backend, transport = self.flags.vllm_sync_backend, self.route.transport
        found = (f"weights travel through {WORDS[transport]}", fallback_warning(backend, transport))
        return [note for note in found if note]

    async def connect(self) -> Route:
        """Locate both ends, choose the transport and connect the ends."""
        trainer: list[SyncEndpoint] = await self.policy.call("sync_endpoint")
        engines: list[SyncEndpoint] = await self.engines.call("sync_endpoint")
        route = await self._route(trainer, engines)
        first_ranks = accumulate((len(engine.gpus) for engine in engines[:-1]), initial=1)
        to_engines = self.engines.scatter("connect", [(route, first) for first in first_ranks])
        await all_or_first_error([self.policy.call("connect", route), to_engines])
        return route

    async def _route(
        self, trainer: Sequence[SyncEndpoint], engines: Sequence[SyncEndpoint]
    ) -> Route:
        config = await self.policy.call_one(0, "adapter_config") if self.adapter else None
        trainer_gpus, engine_gpus = (
            [gpu for end in ends for gpu in end.gpus] for ends in (trainer, engines)
        )
        if not all(engine.gpus for engine in engines):
            engine_gpus = []
        backend = "gloo" if self.adapter else self.flags.vllm_sync_backend
        transport = choose_transport(backend, trainer_gpus, engine_gpus)
        address, port = "", 0
        if transport == "nccl":
            address, port = await self.policy.call_one(0, "open_rendezvous")
        return Route(
            transport=transport,
            remote=any(engine.machine != trainer[0].machine for engine in engines),
            check=self.flags.check_weight_sync,
            adapter=config,
            gpus=tuple(engine_gpus),
            address=address,
            port=port,
            world_size=1 + len(engine_gpus),
            timeout=self.timeout,
            keeps_tower=self.keeps_tower,
        )

    async def _send(self, version: int, call: CallEngines) -> dict[str, Metric]:
        """Send the weights to the engines that ``call`` reaches, with one call to each per bucket.
        On return the engines have confirmed ``version``.

        Returns the bytes of weights, the calls to each engine, and the seconds that it all took."""
        async with self.residency.stage("publish"):
            if self.route is None:
                self.route = await self.connect()
            started, sent, calls = time.monotonic(), 0, 0
            size = self.flags.sync_bucket_mb * 2**20
            await self.policy.call("begin_sync", version, size)
            next_bucket = partial(self.policy.call_for_handle, "next_bucket")
            bucket = await next_bucket()
            while bucket is not None:
                # the policy packs the next bucket while the engines load this one
                work = {0: call("load_bucket", bucket), 1: next_bucket()}
                # where one end dies in a broadcast, the other fails too: the death is what counts
                loaded, bucket = await gather_ranks("sync", "load_bucket", work, None)
                sent += max(loaded, default=0)
                calls += 1
            confirmed = await call("finish_sync", version)
            if any(got != version for got in confirmed):
                raise RuntimeError(f"weights {version} were sent, but engines report {confirmed}")
            await self.policy.call("end_sync")
            seconds = time.monotonic() - started
            await self.residency.log_memory("sync", "actor", ENGINES)
        figures = {"sync_bytes": sent, "sync_rpcs": calls + 1, "sync_seconds": seconds}
        return {f"perf/{name}": Last(float(figure)) for name, figure in figures.items()}
