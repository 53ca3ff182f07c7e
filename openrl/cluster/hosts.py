"""What surrounds a worker in its own process: the actors of Ray that build it and pass calls on."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from openrl.cluster.group import WorkerContext, is_async, iterate, maybe_await
from openrl.cluster.life import NO_LOGS, LogSpec, begin_log
from openrl.cluster.ray_cluster import Reservation
from openrl.registry import load_plugins


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


@dataclass(frozen=True)
class Making:
    """How the processes of a group are made: at its start, and again when one has died."""

    role: str
    reservation: Reservation
    worker_class: type
    args: tuple[Any, ...]  # of its constructor, after the context
    envs: Sequence[dict[str, str]]  # environment of each rank
    concurrency: int  # calls that run at a time in a worker with coroutine methods
    plugins: tuple[str, ...] = ()
    logs: LogSpec = NO_LOGS

    @property
    def size(self) -> int:
        return self.reservation.plan.size(self.role)

    def actor(self, rank: int) -> Any:
        """A new process in the place of this rank."""
        host, options = (
            (AsyncHost, {"max_concurrency": self.concurrency})
            if is_async(self.worker_class)
            else (PlainHost, {})
        )
        placed = ray.remote(host).options(
            runtime_env={"env_vars": self.envs[rank]},
            **options,
            **self.reservation.actor_options(self.role, rank),
        )
        return placed.remote()

    def build(self, actor: Any, rank: int, address: str, port: int) -> ray.ObjectRef:
        """Build the worker in it; ``address`` and ``port`` are those of the role's first rank."""
        plan = self.reservation.plan
        context = WorkerContext(
            self.role,
            rank,
            self.size,
            plan.local_ranks(self.role)[rank],
            address,
            port,
            self.plugins,
            self.envs[rank],
            plan.spans_nodes(self.role, rank),
            self.logs.path(self.role, rank),
        )
        return actor.build.remote(str(Path.cwd()), self.worker_class, context, *self.args)
