"""Joining the ranks of one model: a torch.distributed process group, gloo on a CPU and nccl on a GPU."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist


def init_distributed(rank: int, world_size: int, master_addr: str, master_port: int, device: str, timeout: int) -> None:
    """Join the default process group. Rank 0 must be the process at ``master_addr``.

    Args:
        device: "cpu" or "cuda"; on a GPU each process sees its own device as number 0.
        timeout: seconds any collective may take before the group aborts.

    Nothing listens beyond ``master_addr``; a single rank opens no port at all. A second call changes nothing.
    """
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
        "nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
    )


def close_distributed() -> None:
    """Leave the process group, if there is one. Several ranks that end a process without it abort at random (SIGABRT):
    the interpreter goes down under the group's threads.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _tcp_store(rank: int, world_size: int, addr: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Torch's own listening socket is bound to every interface; this one is bound to ``addr``."""
    descriptor = None
    if rank == 0:
        listener = socket.create_server((addr, port), backlog=max(world_size, 128))
        descriptor = listener.detach()  # the store closes it
    return dist.TCPStore(addr, port, world_size, rank == 0, timeout, master_listen_fd=descriptor)
