"""The policy's weights on their way to all engines: what is agreed on once, and what happens at
each sync."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

from openrl.cluster.group import WorkerGroup
from openrl.config.rollout import EngineFlags
from openrl.tracking.metrics import Last, Metric
from openrl.trainer.waiting import all_or_first_error
from openrl.weights.transport import WORDS, Route, SyncEndpoint, choose_transport


class WeightSync:
    """Between the ranks of the policy and the engines; the driver passes announcements on and never
    sees a weight."""

    def __init__(
        self,
        policy: WorkerGroup,
        rollout: WorkerGroup,
        flags: EngineFlags,
        adapter: bool = False,
        timeout: int = 3600,
    ) -> None:
        """``adapter``: send adapters alone. ``timeout``: seconds that processes wait for each
        other."""
        self.policy, self.rollout, self.flags = policy, rollout, flags
        self.adapter, self.timeout = adapter, timeout
        self.route: Route | None = None

    @property
    def way(self) -> str:
        """How weights travel, in words; known from the first sync on."""
        return WORDS[self.route.transport] if self.route else "a way that is not yet chosen"

    async def connect(self) -> Route:
        """Find out where both ends are, choose the transport, and bring the ends together."""
        trainer: list[SyncEndpoint] = await self.policy.call("sync_endpoint")
        engines: list[SyncEndpoint] = await self.rollout.call("sync_endpoint")
        route = await self._route(trainer, engines)
        first_ranks = accumulate((len(engine.gpus) for engine in engines[:-1]), initial=1)
        await all_or_first_error(
            [
                self.policy.call("connect", route),
                self.rollout.scatter("connect", [(route, first) for first in first_ranks]),
            ]
        )
        return route

    async def _route(
        self, trainer: Sequence[SyncEndpoint], engines: Sequence[SyncEndpoint]
    ) -> Route:
        config = await self.policy.first("adapter_config") if self.adapter else None
        ours, theirs = ([gpu for end in ends for gpu in end.gpus] for ends in (trainer, engines))
        if not all(engine.gpus for engine in engines):
            theirs = []
        backend = "gloo" if self.adapter else self.flags.vllm_sync_backend
        transport = choose_transport(backend, ours, theirs)
        address, port = await self.policy.first("meet") if transport == "nccl" else ("", 0)
        return Route(
            transport=transport,
            remote=any(engine.machine != trainer[0].machine for engine in engines),
            check=self.flags.check_weight_sync,
            adapter=config,
            gpus=tuple(theirs),
            address=address,
            port=port,
            world_size=1 + len(theirs),
            timeout=self.timeout,
        )

    async def send(self, version: int) -> dict[str, Metric]:
        """Give the policy's weights to every engine, one call per bucket; the engines have
        confirmed ``version``.

        Returns bytes of weights and calls to each engine, and the seconds that all took.
        """
        if self.route is None:
            self.route = await self.connect()
        started, sent, calls = time.monotonic(), 0, 0
        async for ranks in self.policy.stream_handles(
            "send_weights", version, self.flags.sync_bucket_mb * 2**20
        ):
            sent += (await self.rollout.call("load_bucket", ranks[0]))[0]
            calls += 1
        confirmed = await self.rollout.call("finish_sync", version)
        if wrong := {rank: got for rank, got in enumerate(confirmed) if got != version}:
            raise RuntimeError(
                f"weights {version} were sent, but engines report {wrong} (engine: version)"
            )
        await self.policy.call("end_sync")
        seconds = time.monotonic() - started
        figures = {"sync_bytes": sent, "sync_rpcs": calls + 1, "sync_seconds": seconds}
        return {f"perf/{name}": Last(float(figure)) for name, figure in figures.items()}
