"""Worker groups whose workers live in Ray actors, one process per rank."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RaySystemError, RayTaskError

from openrl.cluster.group import (
    Pending,
    WorkerContext,
    WorkerDied,
    WorkerGroup,
    WorkerTimeout,
    gather_ranks,
    is_async,
    raised_by,
)
from openrl.cluster.hosts import BEAT_S, ActorHost, AsyncActorHost, GroupSettings, Heartbeat
from openrl.cluster.placement import PlacementPlan
from openrl.cluster.planner import RoleRequest
from openrl.cluster.ray_cluster import RayCluster, open_cluster
from openrl.cluster.reservation import Reservation
from openrl.config.groups.placement import ENGINES, ClusterFlags
from openrl.tracking.progress import Stage
from openrl.waiting import all_or_first_error, cancel_all

log = logging.getLogger(__name__)

CONCURRENCY = 1000  # calls at a time in a worker with coroutine methods: more than it ever gets
CLOSE_S = 30.0  # timeout of the workers' close()
SMALL = (int, float, str, bool, type(None))  # cheaper inside a call than as a Ray object
LONGEST_WORDS = 300  # characters kept of each line of last words
HEADER = re.compile(r":(job_id|actor_name|task_name):|-- \S+-\d+, process \d+, ")
"""The lines with which Ray, and ``begin_log``, begin the log of a worker."""


class RayGroup(WorkerGroup):
    """A ``WorkerGroup`` of Ray actors. Use ``create`` to build one."""

    def __init__(
        self,
        cluster: RayCluster,
        reservation: Reservation,
        role: str,
        settings: GroupSettings,
        worker_class: type,
        args: tuple[Any, ...],
        envs: Sequence[dict[str, str]],
    ) -> None:
        """``args`` are the constructor's after the context, ``envs`` the environments by rank."""
        self.role, self.size = role, len(envs)
        self.ranks_per_shard, self.timeout = settings.ranks_per_shard, settings.timeout
        self._cluster, self._reservation, self._settings = cluster, reservation, settings
        self._worker_class, self._envs = worker_class, envs
        self._args = self._shared(args, self.size)
        self._actors: dict[int, Any] = {}  # by rank
        # (address, free port, process id) of each rank that has answered
        self._places: dict[int, tuple[str, int, int]] = {}
        self._broken = False  # a rank died or hangs, so asking the workers to close is pointless
        self._dead: set[int] = set()  # ranks that died and were not restarted
        self._heartbeats = [Heartbeat(settings.log_path(role, rank)) for rank in range(self.size)]
        self._watcher: asyncio.Task[None] | None = None
        self._loss: Exception | None = None  # why no call is answered any more
        self._under_way: set[asyncio.Future[Any]] = set()  # calls that wait for answers

    @classmethod
    async def create(
        cls,
        cluster: RayCluster,
        reservation: Reservation,
        role: str,
        settings: GroupSettings,
        worker_class: type,
        *args: Any,
    ) -> RayGroup:
        """Start one actor per rank of the role and build ``worker_class(context, *args)`` in each.

        A worker with coroutine methods runs its calls side by side, others one at a time. If a
        constructor raises, its error is raised here after all actors are killed."""
        size = reservation.plan.size(role)
        device = reservation.plan.device
        env = {
            **worker_env(role, device, size, cluster.local),
            **cluster.scratch(),
            **settings.env,
        }
        if device == "cpu" and settings.preload:
            env |= cluster.forked(env, settings.preload)
        of_ranks = (reservation.environment(role, rank) for rank in range(size))
        envs = [env | found for found in await asyncio.gather(*of_ranks)]
        group = cls(cluster, reservation, role, settings, worker_class, args, envs)
        try:
            await group._start(range(size))
            if settings.log_dir:
                group._watcher = asyncio.create_task(group._watch())
        except BaseException:
            group._kill()
            raise
        return group

    async def _start(self, ranks: Sequence[int]) -> None:
        """Start a process for each of these ranks, side by side, and build its worker."""
        settings, here, begun = self._settings, str(Path.cwd()), {}
        early = settings.preload and settings.preload.early
        for rank in ranks:
            self._actors[rank] = actor = self._actor(rank)
            log_path = settings.log_path(self.role, rank)
            ref = actor.begin.remote(here, log_path, early)
            begun[rank] = self._answer(rank, "start", ref)
        self._places |= dict(zip(ranks, await self._gather("start", begun), strict=True))
        built = {rank: self._answer(rank, "__init__", self._build(rank)) for rank in ranks}
        await self._gather("__init__", built)

    def _actor(self, rank: int) -> Any:
        """Start a new process in this rank's place and return its actor."""
        options = self._reservation.actor_options(self.role, rank)
        host: type = ActorHost
        if is_async(self._worker_class):
            host, options = AsyncActorHost, options | {"max_concurrency": CONCURRENCY}
        environment = {"env_vars": self._envs[rank]}
        return ray.remote(host).options(runtime_env=environment, **options).remote()

    def _build(self, rank: int) -> ray.ObjectRef:
        """Build the worker in its process."""
        plan, (address, port, _) = self._reservation.plan, self._places[0]
        context = WorkerContext(
            self.role,
            rank,
            self.size,
            plan.local_ranks(self.role)[rank],
            address,
            port,
            self._settings.plugins,
            plan.spans_nodes(self.role, rank),
        )
        return self._actors[rank].build.remote(self._worker_class, context, *self._args)

    async def restart(self, rank: int) -> None:
        with suppress(RaySystemError):
            ray.kill(self._actors[rank])  # still alive if only a child process died
        await self._start([rank])
        self._dead.discard(rank)
        self._broken = bool(self._dead)

    def _shared(self, args: tuple[Any, ...], ranks: int) -> tuple[Any, ...]:
        """Store large arguments in Ray's object store once, instead of sending a copy to each
        rank."""
        if ranks == 1:
            return args
        return tuple(a if isinstance(a, (ray.ObjectRef, *SMALL)) else ray.put(a) for a in args)

    def _send(self, rank: int, method: str, args: tuple[Any, ...]) -> Awaitable[Any]:
        return self._answer(rank, method, self._actors[rank].invoke.remote(method, *args))

    async def call_one(self, rank: int, method: str, *args: Any) -> Any:
        ref = self._actors[rank].invoke.remote(method, *args)
        try:
            return (await self._gather(method, {rank: self._answer(rank, method, ref)}))[0]
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise

    async def call_for_handle(self, method: str, *args: Any) -> Any:
        refs = [
            self._actors[rank].hand_out.options(num_returns=2).remote(method, *args)
            for rank in range(self.size)
        ]
        found = {rank: self._answer(rank, method, ref) for rank, (ref, _) in enumerate(refs)}
        return refs[0][1] if (await self._gather(method, found))[0] else None

    async def close(self) -> None:
        """Call the workers' ``close``, unless one died or hangs, then end their processes."""
        if not self._broken and self._actors and hasattr(self._worker_class, "close"):
            try:
                calls = {rank: self._send(rank, "close", ()) for rank in self._actors}
                await gather_ranks(self.role, "close", calls, CLOSE_S, self._describe)
            except Exception as error:
                log.warning("%s did not close cleanly and was killed: %s", self.role, error)
        self._kill()

    async def _watch(self) -> None:
        """Watch the workers' signs of life until one is lost, then fail all calls under way."""
        most = self._settings.stall_timeout or math.inf
        while self._loss is None:
            await asyncio.sleep(min(BEAT_S, most / 4))
            self._loss = self._find_loss(most)
        for waiting in self._under_way:
            waiting.cancel()

    def _find_loss(self, most: float) -> Exception | None:
        """Return the error if Ray died, or if it or a worker gave no sign of life for ``most``
        seconds."""
        self._cluster.end_stopped(most)
        if dead := self._cluster.dead():
            return WorkerDied(dead)
        for rank in {*range(self.size)} - self._dead:
            silence = self._heartbeats[rank].silence()
            if silence is not None and silence > most:
                hangs = f"{self.role} rank {rank} has not moved for {silence:.0f} s"
                words = f"{hangs} (--stall_timeout {most:g}): {self._place(rank)}"
                return WorkerTimeout(words + self._last_words(rank))
        return None

    def _kill(self) -> None:
        if self._watcher:
            self._watcher.cancel()
        for actor in self._actors.values():
            with suppress(RaySystemError):  # Ray itself has ended
                ray.kill(actor)
        self._actors.clear()

    async def _gather(self, method: str, pending: Pending) -> list[Any]:
        gathering = gather_ranks(self.role, method, pending, self.timeout, self._describe)
        # each call is noted here, since to wait for one future beside all others takes time in
        # proportion to their number
        answers = asyncio.ensure_future(gathering)
        self._under_way.add(answers)
        try:
            if self._loss is not None:
                await cancel_all([answers])
                raise self._loss
            return await answers
        except (WorkerDied, WorkerTimeout):
            self._broken = True
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._loss is None or (task and task.cancelling()):
                raise  # the caller gave up
            self._broken = True
            raise self._loss from None
        finally:
            self._under_way.discard(answers)

    async def _answer(self, rank: int, method: str, ref: ray.ObjectRef) -> Any:
        """Return a call's result. Raises the worker's own exception, or WorkerDied."""
        try:
            return await ref
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, WorkerDied):  # a process that the worker needs has died
                raise self._died(rank, method, str(cause)) from error
            cause.add_note(
                raised_by(self.role, rank, method, self._settings.log_path(self.role, rank))
            )
            raise cause from error
        except RayActorError as error:
            raise self._died(rank, method, str(error).strip().splitlines()[-1]) from error

    def _died(self, rank: int, method: str, reason: str) -> WorkerDied:
        if dead := self._cluster.dead():
            return WorkerDied(dead)
        self._dead.add(rank)
        what = f"{self.role} rank {rank} died in {method} ({self._place(rank)})"
        return WorkerDied(f"{what}: {reason}{self._last_words(rank)}", rank)

    def _place(self, rank: int) -> str:
        if not self._places:
            return "its process never answered"
        address, _, pid = self._places[rank]
        return f"process {pid} on {address}"

    def _describe(self, rank: int) -> str:
        return f"rank {rank}: {self._place(rank)}, not known to have died{self._last_words(rank)}"

    def _last_words(self, rank: int) -> str:
        """Return the last lines of the worker's logs that say something, if they are on this
        machine."""
        if not self._places:
            return ""
        found = [
            *(self._cluster.session_dir / "logs").glob(f"worker-*-{self._places[rank][2]}.err")
        ]
        own = Path(self._settings.log_path(self.role, rank))
        if own.is_file():
            found.append(own)
        lines = [
            line
            for file in found
            for line in _tail(file).splitlines()
            if line.strip() and not HEADER.match(line)
        ]
        where = f"\n  its log: {own}" if own.is_file() else ""
        return "".join(f"\n    {line[:LONGEST_WORDS]}" for line in lines[-5:]) + where


@asynccontextmanager
async def reserved_cluster(
    flags: ClusterFlags,
    requests: Sequence[RoleRequest],
    device: str,
    stage: Stage,
    accept: Callable[[PlacementPlan], None] = lambda plan: None,
) -> AsyncIterator[tuple[RayCluster, Reservation, list[RayGroup]]]:
    """Join or start a cluster and reserve the bundles of these roles on it, once ``accept`` has not
    refused the plan. The groups that are put into the list end with the with block, and then the
    cluster does if it is our own: no process outlives the block."""
    groups: list[RayGroup] = []
    with stage("start"):
        cluster, plan = open_cluster(flags, requests, device)
    try:
        accept(plan)
        with stage("start"):
            reservation = await cluster.reserve(plan, flags.placement_timeout)
        yield cluster, reservation, groups
    finally:
        try:
            await all_or_first_error(group.close() for group in groups)
        finally:
            cluster.close()


def _tail(file: Path) -> str:
    """Return the last 4 KiB of a log file as text."""
    with file.open("rb") as opened:
        opened.seek(max(file.stat().st_size - 4096, 0))
        return opened.read().decode(errors="replace")


HEAP = f"glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold={2**33}"
MAP_LARGE = f"{HEAP}:glibc.malloc.mmap_threshold={2**22}"
JEMALLOC = Path(ray.__file__).parent / "core" / "libjemalloc.so"
KEEP = "thp:always,narenas:1,oversize_threshold:0,dirty_decay_ms:-1"
"""How workers on a CPU manage memory: a page fault per 2 MB instead of one per 4 kB.

Models keep what they free, because every pass would otherwise take and clear the pages of its
activations again: a fifth of an optimizer step of a model of 135M parameters. They do so in
jemalloc, which Ray brings along. glibc (2.36) never puts a tensor into a hole of exactly its size,
since it looks for some bytes more to align it, and so takes up to twice the memory. What sleeps is
given back by ``empty_cache``.

Engines, and models where Ray has no jemalloc, map tensors from 4 MiB on one by one, and give them
back when they are freed: kernels that oneDNN keeps come between the logits of different batches,
and holes that no later logits fit into took four times the memory, and more time."""


def worker_env(role: str, device: str, ranks: int, local: bool) -> dict[str, str]:
    """Return default environment variables for a role's processes. The user's own environment
    overrides them.

    The ranks of a role share the cores, where Ray's default is a single thread: on a CPU for
    everything, on a GPU for the optimizer of --adam_offload and the trial of a loaded model. Roles
    mostly take turns; when two do run at once, threads that spin while they wait would keep the
    cores from the threads they wait for, so waiting is passive. On a cluster of our own,
    collectives stay on the loopback interface."""
    env: dict[str, str] = {}
    if device == "cpu" or role != ENGINES:
        env |= {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
            "OMP_WAIT_POLICY": "passive",
        }
    if device == "cpu":
        env["GLIBC_TUNABLES"] = MAP_LARGE
        if role != ENGINES and JEMALLOC.exists():
            env |= {"LD_PRELOAD": str(JEMALLOC), "MALLOC_CONF": KEEP}
    if local:
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    return {name: os.environ.get(name, value) for name, value in env.items()}
