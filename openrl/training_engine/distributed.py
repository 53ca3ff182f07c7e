"""The torch.distributed process group of one model's ranks: gloo on a CPU, nccl on a GPU."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from openrl.config.groups.placement import has_launcher
from openrl.errors import UserError


@dataclass(frozen=True)
class ParallelLayout:
    """How the ranks of one training engine divide the work.

    Rows are dealt to data-parallel ranks. A data-parallel rank is a block of sp_size * tp_size
    neighbouring ranks that get the same rows: sequence parallelism splits every sequence into
    sp_size parts, and tensor parallelism splits every layer among the tp_size ranks of each
    part."""

    rank: int = 0
    world_size: int = 1
    sp_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.ranks_per_shard:
            raise ValueError(
                f"{self.world_size} ranks are no multiple of sp {self.sp_size} * tp {self.tp_size}"
            )

    @property
    def ranks_per_shard(self) -> int:
        """Number of neighbouring ranks that get the same rows."""
        return self.sp_size * self.tp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.ranks_per_shard

    def sequence_groups(self) -> list[list[int]]:
        """The groups of ranks that share one row's sequence, each in the order of its parts. Every
        rank is in exactly one."""
        blocks = range(0, self.world_size, self.ranks_per_shard)
        return [
            list(range(first + tp, first + self.ranks_per_shard, self.tp_size))
            for first in blocks
            for tp in range(self.tp_size)
        ]


@dataclass(frozen=True)
class Launch:
    """This process's identity among those that a launcher such as torchrun started, read from the
    environment."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int

    @classmethod
    def from_environment(cls, local_rank: int = -1) -> Launch | None:
        """Read the launcher's environment; None if there is none. With ``local_rank`` -1,
        $LOCAL_RANK counts. Raises UserError for values that no launcher sets."""
        env = os.environ
        if not has_launcher():
            return None
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"):
            if not env.get(name, "0").isdecimal():
                problem = f"${name} is {env[name]!r}: not a number, as launchers set it"
                raise UserError(problem, f"unset {name}, or start with torchrun, which sets it")
        own = local_rank if local_rank >= 0 else int(env.get("LOCAL_RANK", "0"))
        rank, world_size, port = (int(env[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if rank >= world_size:
            problem = f"$RANK {rank} is not below $WORLD_SIZE {world_size}"
            raise UserError(problem, "unset both, or start with torchrun, which sets them")
        return cls(rank, world_size, own, env["MASTER_ADDR"], port)

    def join(self, device: str, timeout: int) -> None:
        """Join the process group of all ranks, see ``init_distributed``."""
        address = self.master_addr, self.master_port
        init_distributed(self.rank, self.world_size, *address, device, timeout)

    def take_own_gpu(self) -> None:
        """Make this process see only its own GPU, as number 0, as Ray does, before CUDA is used."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = seen.split(",") if seen else []
        # otherwise the launcher has already restricted it to one
        if not devices or self.local_rank < len(devices):
            own = devices[self.local_rank] if devices else str(self.local_rank)
            os.environ["CUDA_VISIBLE_DEVICES"] = own
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed uses it as the device number


def init_distributed(
    rank: int, world_size: int, master_addr: str, master_port: int, device: str, timeout: int
) -> None:
    """Join the default process group. Rank 0 must be the process at ``master_addr``.

    Args:
        device: "cpu" or "cuda"; on a GPU each process sees its own device as number 0.
        timeout: seconds that a collective may take before the group aborts.

    The group listens on ``master_addr`` only. A second call has no effect."""
    # DeepSpeed reads these when it is imported and when an engine is built. Those of a job that
    # started other processes would make it ask for a GPU that this one does not see.
    own = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    os.environ |= {"DS_ACCELERATOR": device} | own
    if dist.is_initialized():
        return
    limit = timedelta(seconds=timeout)
    if socket.gethostbyname(master_addr).startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        store = _tcp_store(rank, world_size, master_addr, master_port, limit)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(0)
        backend = "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


_groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}


def own_group(members: list[list[int]], timeout: int) -> dist.ProcessGroup:
    """Return this rank's process group, given ``members``, a partition of all ranks. Collective; a
    partition's groups are created once. ``timeout`` as for ``init_distributed``."""
    key, limit = tuple(map(tuple, members)), timedelta(seconds=timeout)
    if key not in _groups:
        # torch requires that every rank creates every group, in the same order
        made = [dist.new_group(ranks, timeout=limit) for ranks in members]
        own = next(n for n, ranks in enumerate(members) if dist.get_rank() in ranks)
        _groups[key] = made[own]
    return _groups[key]


def close_distributed() -> None:
    """Leave the process group, if there is one. Several ranks that exit without this abort at
    random (SIGABRT): the interpreter shuts down under the group's threads."""
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _tcp_store(
    rank: int, world_size: int, addr: str, port: int, timeout: timedelta
) -> dist.TCPStore:
    """Open the store that ranks meet at, on ``addr`` only; torch's own is on every interface."""
    descriptor = None
    # torchrun's own store already listens there
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(addr, port, world_size, False, timeout)
    if rank == 0:
        listener = socket.create_server((addr, port), backlog=max(world_size, 128))
        descriptor = listener.detach()  # the store closes it
    return dist.TCPStore(addr, port, world_size, rank == 0, timeout, master_listen_fd=descriptor)
