"""Joining the ranks of one model: a torch.distributed process group, gloo on a CPU and nccl on a
GPU."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from openrl.errors import UserError


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher such as torchrun started, by the environment it
    gives them."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int

    @classmethod
    def from_environment(cls, local_rank: int = -1) -> Launch | None:
        """None where no launcher started this process. ``local_rank`` -1: $LOCAL_RANK."""
        env = os.environ
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
            return None
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"):
            if not env.get(name, "0").isdecimal():
                remedy = f"unset {name}, or start with torchrun, which sets it"
                raise UserError(f"${name} is {env[name]!r}: no number of a launcher", remedy)
        own = local_rank if local_rank >= 0 else int(env.get("LOCAL_RANK", "0"))
        return cls(
            int(env["RANK"]),
            int(env["WORLD_SIZE"]),
            own,
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
        )

    def take_own_gpu(self) -> None:
        """Let this process see its own GPU alone, as number 0, as Ray does. Must run before CUDA is
        first asked."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = seen.split(",") if seen else []
        # else the launcher has shown it one alone
        if not devices or self.local_rank < len(devices):
            os.environ["CUDA_VISIBLE_DEVICES"] = (
                devices[self.local_rank] if devices else str(self.local_rank)
            )
        os.environ["LOCAL_RANK"] = "0"  # what DeepSpeed takes for the number of the device


def init_distributed(
    rank: int, world_size: int, master_addr: str, master_port: int, device: str, timeout: int
) -> None:
    """Join the default process group. Rank 0 must be the process at ``master_addr``.

    Args:
        device: "cpu" or "cuda"; on a GPU each process sees its own device as number 0.
        timeout: seconds any collective may take before the group aborts.

    Nothing listens beyond ``master_addr``; a single rank opens no port at all. A second call
    changes nothing."""
    # DeepSpeed reads these when it is imported and when an engine is built.
    os.environ["DS_ACCELERATOR"] = device
    os.environ.setdefault("LOCAL_RANK", "0")
    if dist.is_initialized():
        return
    limit = timedelta(seconds=timeout)
    store: dist.Store
    if world_size == 1:
        store = dist.HashStore()
    else:
        if socket.gethostbyname(master_addr).startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = _tcp_store(rank, world_size, master_addr, master_port, limit)
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )


_groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}


def own_group(members: list[list[int]], timeout: int) -> dist.ProcessGroup:
    """The process group of this rank among groups that divide all ranks. Collective; made once for
    the same division.

    ``timeout`` as for ``init_distributed``.
    """
    key, limit = tuple(map(tuple, members)), timedelta(seconds=timeout)
    if key not in _groups:
        # every rank makes every group, in one order
        made = [dist.new_group(ranks, timeout=limit) for ranks in members]
        _groups[key] = next(
            group for group, ranks in zip(made, members, strict=True) if dist.get_rank() in ranks
        )
    return _groups[key]


def close_distributed() -> None:
    """Leave the process group, if there is one. Several ranks that end a process without it abort
    at random (SIGABRT): the interpreter goes down under the group's threads."""
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _tcp_store(
    rank: int, world_size: int, addr: str, port: int, timeout: timedelta
) -> dist.TCPStore:
    """Torch's own listening socket is bound to every interface; this one is bound to ``addr``."""
    descriptor = None
    # torchrun's own store listens there already
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(addr, port, world_size, False, timeout)
    if rank == 0:
        listener = socket.create_server((addr, port), backlog=max(world_size, 128))
        descriptor = listener.detach()  # the store closes it
    return dist.TCPStore(addr, port, world_size, rank == 0, timeout, master_listen_fd=descriptor)
