"""Worker groups whose workers live in Ray actors, one process per rank."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RaySystemError, RayTaskError

from openrl.cluster.group import (
    END,
    Handle,
    WorkerContext,
    WorkerDied,
    WorkerTimeout,
    all_ended,
    check_shards,
    gather_ranks,
    is_async,
    iterate,
    maybe_await,
    raised_by,
)
from openrl.cluster.life import BEAT_S, begin_log, silence
from openrl.cluster.ray_cluster import RayCluster, Reservation
from openrl.registry import load_plugins

log = logging.getLogger(__name__)

ITEMS_AHEAD = 2  # items of a stream that may wait unread; then its generator pauses
CLOSE_S = 30.0  # patience for a worker's own close()
SMALL = (int, float, str, bool, type(None))  # cheaper inside a call than as an object of their own


LONGEST_WORDS = 300  # characters of a line of last words


@dataclass(frozen=True)
class LogSpec:
    """Where workers leave their logs, and how long one may show no sign of life."""

    directory: str = ""  # absolute; empty: Ray's own logs alone
    stall_timeout: float = 0.0  # seconds; 0: for ever

    def path(self, role: str, rank: int) -> str:
        return str(Path(self.directory) / f"{role}-{rank}.log") if self.directory else ""


NO_LOGS = LogSpec()


class PlainHost:
    """The actor around a worker whose methods are plain: one call at a time, on the main thread."""

    def __init__(self) -> None:
        # A cluster as ``start_cluster`` makes it ignores the end of children in its workers, and in
        # their children in turn: every exit code would read 0. By libc, since the actors of
        # coroutines are made beside the main thread.
        ctypes.CDLL(None).signal(signal.SIGCHLD, ctypes.c_void_p(signal.SIG_DFL))

    def where(self) -> tuple[str, int, int]:
        """(address of the node, a port that is free on it, process id)"""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1], os.getpid()

    def build(self, directory: str, worker_class: type, context: WorkerContext, *args: Any) -> None:
        """Here and not in the constructor, so that errors keep their type.

        ``directory`` is the driver's: relative paths in flags mean the same here. A node without it
        stays where it is."""
        if Path(directory).is_dir():
            os.chdir(directory)
        if context.log:
            begin_log(context.log, f"{context.role} rank {context.rank}")
        load_plugins(context.plugins)
        self._worker = worker_class(context, *args)
        self._failed: dict[int, Exception] = {}

    def invoke(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)

    def stream(self, key: int, method: str, *args: Any) -> Any:
        """Items of a generator. An error ends the stream and waits for ``ended``: as an item it
        would travel on, inside a handle, and be raised in the wrong place."""
        try:
            # not yield from: Ray drives this generator by send(), which not every iterator has
            for item in getattr(self._worker, method)(*args):  # noqa: UP028
                yield item
        except Exception as error:
            self._failed[key] = error

    def ended(self, key: int) -> None:
        """Raise the error that ended a stream, if one did."""
        if key in self._failed:
            raise self._failed.pop(key)

    def close(self) -> Any:
        if hasattr(self._worker, "close"):
            self._worker.close()


class AsyncHost(PlainHost):
    """The actor around a worker with coroutine methods: many calls at a time, on one event loop."""

    async def invoke(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await maybe_await(getattr(self._worker, method)(*args, **kwargs))

    async def stream(self, key: int, method: str, *args: Any) -> Any:
        try:
            async with aclosing(iterate(getattr(self._worker, method)(*args))) as items:
                async for item in items:
                    yield item
        except Exception as error:
            self._failed[key] = error

    async def close(self) -> None:
        if hasattr(self._worker, "close"):
            await maybe_await(self._worker.close())


class RayGroup:
    """See ``WorkerGroup``. Made by ``create``."""

    def __init__(
        self,
        role: str,
        cluster: RayCluster,
        actors: list[Any],
        timeout: float | None,
        ranks_per_shard: int,
        logs: LogSpec,
    ) -> None:
        self.role, self.size, self.ranks_per_shard = role, len(actors), ranks_per_shard
        self._cluster, self._actors, self.timeout = cluster, actors, timeout
        self._places: list[
            tuple[str, int, int]
        ] = []  # (address, free port, process id) of each rank
        self._stream_keys = count()
        self._broken = False  # a rank died or hangs: no use in asking the workers to close
        self._logs = logs
        self._watcher: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[None] | None = None  # fails when a rank shows no sign of life

    @classmethod
    async def create(
        cls,
        cluster: RayCluster,
        reservation: Reservation,
        role: str,
        worker_class: type,
        *args: Any,
        timeout: float | None = 3600,
        concurrency: int = 1000,
        plugins: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        ranks_per_shard: int = 1,
        logs: LogSpec = NO_LOGS,
    ) -> RayGroup:
        """One actor in every slot of the role's row; builds ``worker_class(context, *args)`` in
        each.

        ``concurrency`` bounds the calls that run at a time in a worker with coroutine methods;
        others run one. ``env`` is set before the worker's process starts, over ``worker_env``'s
        defaults. What constructors raise is raised here, and the actors are gone."""
        plan = reservation.plan
        size = plan.size(role)
        env = worker_env(plan.device, size, cluster.local) | (env or {})
        host, options = (
            (AsyncHost, {"max_concurrency": concurrency})
            if is_async(worker_class)
            else (PlainHost, {})
        )
        actor = ray.remote(host)
        places = await asyncio.gather(
            *(reservation.environment(role, rank) for rank in range(size))
        )
        actors = [
            actor.options(
                runtime_env={"env_vars": env | places[rank]},
                **options,
                **reservation.actor_options(role, rank),
            ).remote()
            for rank in range(size)
        ]
        group = cls(role, cluster, actors, timeout, ranks_per_shard, logs)
        try:
            group._places = await group._answers("start", [a.where.remote() for a in actors])
            address, port, _ = group._places[0]
            contexts = [
                WorkerContext(
                    role,
                    rank,
                    size,
                    local_rank,
                    address,
                    port,
                    plugins,
                    env | places[rank],
                    plan.spans_nodes(role, rank),
                    logs.path(role, rank),
                )
                for rank, local_rank in enumerate(plan.local_ranks(role))
            ]
            shared = group._share(args)
            builds = [
                a.build.remote(str(Path.cwd()), worker_class, context, *shared)
                for a, context in zip(actors, contexts, strict=True)
            ]
            await group._answers("__init__", builds)
            group._watch()
        except BaseException:
            group._kill()
            raise
        return group

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        shared = self._share(args)
        named = dict(zip(kwargs, self._share(tuple(kwargs.values())), strict=True))
        return await self._answers(
            method, [a.invoke.remote(method, *shared, **named) for a in self._actors]
        )

    async def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        check_shards(self, method, shards)
        each = self.ranks_per_shard
        stored = [shard if each == 1 else self._share(shard) for shard in shards]
        calls = [
            a.invoke.remote(method, *stored[rank // each]) for rank, a in enumerate(self._actors)
        ]
        return (await self._answers(method, calls))[::each]

    async def one(self, rank: int, method: str, *args: Any) -> Any:
        ref = self._actors[rank].invoke.remote(method, *args)
        try:
            return (await self._gather(method, {rank: self._answer(rank, method, ref)}))[0]
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise

    async def stream_handles(self, method: str, *args: Any) -> AsyncGenerator[list[Handle]]:
        shared = self._share(args)
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(self._open_stream(rank, method, shared))
                for rank in range(self.size)
            ]
            while True:
                handles = await self._gather(
                    method, {rank: next_ref() for rank, next_ref in enumerate(streams)}
                )
                if all_ended(self.role, method, handles):
                    return
                yield handles

    async def agreed(self, asked: bool) -> bool:
        return asked

    async def close(self) -> None:
        """Let the workers close, unless one died or hangs; then end their processes."""
        if not self._broken and self._actors:
            try:
                calls = {
                    rank: self._answer(rank, "close", a.close.remote())
                    for rank, a in enumerate(self._actors)
                }
                await gather_ranks(self.role, "close", calls, CLOSE_S, self._describe)
            except Exception as error:
                log.warning("%s did not close cleanly and is killed: %s", self.role, error)
        self._kill()

    def _watch(self) -> None:
        """Look for signs of life from now on."""
        if self._logs.directory:
            self._lost = asyncio.get_running_loop().create_future()
            self._watcher = asyncio.create_task(self._look(self._lost))

    async def _look(self, lost: asyncio.Future[None]) -> None:
        most = self._logs.stall_timeout or math.inf
        while not lost.done():
            await asyncio.sleep(min(BEAT_S, most / 4))
            if dead := self._cluster.dead():
                lost.set_exception(WorkerDied(dead))
                lost.exception()  # whoever waits for an answer raises it; it may be nobody
                return
            for rank in range(self.size):
                quiet = silence(self._logs.path(self.role, rank))
                if quiet is not None and quiet > most:
                    hangs = f"{self.role} rank {rank} has not moved for {quiet:.0f} s"
                    words = f"{hangs} (--stall_timeout {most:g}): {self._place(rank)}"
                    lost.set_exception(WorkerTimeout(words + self._last_words(rank)))
                    lost.exception()
                    return

    def _kill(self) -> None:
        if self._watcher:
            self._watcher.cancel()
        for actor in self._actors:
            with suppress(RaySystemError):  # Ray itself has ended
                ray.kill(actor)
        self._actors.clear()

    def _share(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments that go to every rank, stored once instead of once per rank."""
        if self.size == 1:
            return args
        return tuple(a if isinstance(a, (ray.ObjectRef, *SMALL)) else ray.put(a) for a in args)

    @asynccontextmanager
    async def _open_stream(
        self, rank: int, method: str, args: tuple[Any, ...]
    ) -> AsyncGenerator[Any]:
        """Start a generator on a rank; gives a function whose result is the next item's handle, or
        END."""
        key, host = next(self._stream_keys), self._actors[rank]
        streaming = host.stream.options(
            num_returns="streaming", _generator_backpressure_num_objects=ITEMS_AHEAD
        )
        refs = streaming.remote(key, method, *args)
        over = False

        async def next_ref() -> Any:
            nonlocal over
            ref = await anext(refs, END)
            if ref is END:
                over = True
                await self._answer(rank, method, host.ended.remote(key))
            elif ref == refs.completed():  # not an item: the stream broke off
                over = True
                await self._answer(rank, method, ref)
            return ref

        try:
            yield next_ref
        finally:
            if not over:
                ray.cancel(refs)

    async def _answers(self, method: str, refs: Sequence[ray.ObjectRef]) -> list[Any]:
        return await self._gather(
            method, {rank: self._answer(rank, method, ref) for rank, ref in enumerate(refs)}
        )

    async def _gather(self, method: str, pending: dict[int, Awaitable[Any]]) -> list[Any]:
        answers = gather_ranks(self.role, method, pending, self.timeout, self._describe)
        try:
            return await unless_lost(answers, self._lost)
        except (WorkerDied, WorkerTimeout):
            self._broken = True
            raise

    async def _answer(self, rank: int, method: str, ref: ray.ObjectRef) -> Any:
        """A call's result; the worker's own exception, or WorkerDied."""
        try:
            return await ref
        except RayTaskError as error:
            cause = error.cause
            cause.add_note(raised_by(self.role, rank, method, self._logs.path(self.role, rank)))
            raise cause from error
        except RayActorError as error:
            reason = str(error).strip().splitlines()[-1]
            raise WorkerDied(
                f"{self.role} rank {rank} died in {method} ({self._place(rank)}):"
                f" {reason}{self._last_words(rank)}"
            ) from error

    def _place(self, rank: int) -> str:
        if not self._places:
            return "its process never answered"
        address, _, pid = self._places[rank]
        return f"process {pid} on {address}"

    def _describe(self, rank: int) -> str:
        return f"rank {rank}: {self._place(rank)}, not known to have died{self._last_words(rank)}"

    def _last_words(self, rank: int) -> str:
        """The end of what the worker wrote to its standard error, where its log lies on this
        machine."""
        if not self._places:
            return ""
        found = [
            *(self._cluster.session_dir / "logs").glob(f"worker-*-{self._places[rank][2]}.err")
        ]
        own = Path(self._logs.path(self.role, rank))
        if own.is_file():
            found.append(own)
        lines = [line for file in found for line in _tail(file).splitlines() if line.strip(" :")]
        where = f"\n  its log: {own}" if own.is_file() else ""
        return "".join(f"\n    {line[:LONGEST_WORDS]}" for line in lines[-5:]) + where


async def unless_lost(work: Awaitable[list[Any]], lost: asyncio.Future[None] | None) -> list[Any]:
    """The result of ``work``, or the error of ``lost`` if that comes first."""
    if lost is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        either: set[asyncio.Future[Any]] = {task, lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            lost.result()
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)


def _tail(file: Path, size: int = 4096) -> str:
    """The last bytes of a log file, as text."""
    with file.open("rb") as opened:
        opened.seek(max(file.stat().st_size - size, 0))
        return opened.read().decode(errors="replace")


def worker_env(device: str, ranks: int, local: bool) -> dict[str, str]:
    """Environment of a role's processes: what the user's own environment sets is left as it is.

    On a CPU the ranks of a role share the cores; Ray's default is one thread. Roles mostly take
    turns, but not always: where two of them meet, threads that spin while they wait for each other
    would keep the cores from those that they wait for. glibc gives memory back to the system
    between two micro-batches if nothing lies above it: with huge pages, which it takes by default
    for nothing, touching it again costs one fault for 2 MB instead of 512 (a sixth of a forward
    pass). On a cluster of our own, collectives stay on the loopback interface."""
    env: dict[str, str] = {}
    if device == "cpu":
        env |= {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
            "OMP_WAIT_POLICY": "passive",
        }
        env |= {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    if local:
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    return {name: os.environ.get(name, value) for name, value in env.items()}
