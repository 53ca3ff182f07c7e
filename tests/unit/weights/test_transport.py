"""Which way weights take, and that the bytes of each way arrive."""

from __future__ import annotations

import socket
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from openrl.cluster.group import WorkerContext
from openrl.weights import cuda_ipc
from openrl.weights.buckets import Bucket, WeightManifest, checksum, pack
from openrl.weights.host import HostBuffer
from openrl.weights.transport import (
    Route,
    SentBucket,
    choose_transport,
    corrupted_tensors,
    make_receiver,
    make_sender,
    read_message,
)
from openrl.workers.model_worker import ModelWorker

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("backend", "trainer", "engines", "transport"),
    [
        (None, [], [], "host"),  # no GPU
        ("gloo", [], [], "host"),
        (None, ["a"], [], "host"),  # an engine that reads host memory alone
        (None, ["a"], ["a"], "ipc"),  # everything on one GPU
        # colocated, engines of any width
        ("nccl", ["a", "b", "c", "d"], ["a", "b", "c", "d"], "ipc"),
        (None, ["a", "b", "c", "d"], ["c", "d"], "ipc"),  # engines on some of the actor's GPUs
        (None, ["a", "b"], ["c", "d", "e", "f"], "nccl"),  # apart
        ("nccl", ["a"], ["b"], "nccl"),
        ("gloo", ["a"], ["a"], "host"),  # as told
        ("gloo", ["a"], ["b"], "host"),
        # two engines on one GPU: two readers, and no ranks of NCCL
        (None, ["a", "b"], ["a", "a"], "host"),
        (None, ["a", "b"], ["b", "c"], "nccl"),  # rank 0 is on none of theirs
        # rank 0 meets an engine, another engine meets nobody
        (None, ["a", "b"], ["a", "c"], "host"),
    ],
)
def test_the_way_of_a_placement(backend, trainer, engines, transport):
    assert choose_transport(backend, trainer, engines) == transport


def sent(**changes) -> SentBucket:
    manifest = WeightManifest(3, ("a", "b"), ("float32", "bfloat16"), ((2, 3), (5,)))
    return replace(
        SentBucket(
            manifest, {"path": "/p", "gpus": {"GPU-1": [3, b"handle", True]}}, (1, 2**64 - 1)
        ),
        **changes,
    )


def test_an_announcement_crosses_channels_of_builtin_types():
    """vLLM's own goes through msgpack."""
    wire = msgspec.msgpack.encode(sent().message())
    assert read_message(msgspec.msgpack.decode(wire)) == sent()
    assert sent().nbytes == 2 * 3 * 4 + 5 * 2
    route = Route("ipc", remote=True, gpus=("GPU-1", "GPU-2"), world_size=3)
    assert Route(**msgspec.msgpack.decode(msgspec.msgpack.encode(route.message()))) == replace(
        route, gpus=[*route.gpus]
    )


def test_checksums_name_what_changed():
    named = [("a", torch.randn(4)), ("b", torch.full((3,), 0.5)), ("c", torch.zeros(2))]
    bucket = pack(named, 1, lambda size: torch.zeros(size, dtype=torch.uint8))
    announced = SentBucket(bucket.manifest, {}, tuple(checksum(tensor) for _, tensor in named))
    assert corrupted_tensors(announced, bucket) == []
    dict(bucket.tensors())["b"][1] += 1e-7
    assert corrupted_tensors(announced, bucket) == ["b"]
    assert corrupted_tensors(replace(announced, checksums=()), bucket) == []


def test_host_memory_carries_a_sync_and_the_next():
    sender, receiver = (make(Route(), 0, CPU) for make in (make_sender, make_receiver))
    for version in (1, 2):
        weights = [torch.randn(5), torch.randn(7)]
        announced = [sender.announce(pack([("a", w)], version, sender.allocate)) for w in weights]
        for one, weight in zip(announced, weights, strict=True):
            assert one.data is None
            assert torch.equal(
                dict(Bucket(one.manifest, receiver.open(one)).tensors())["a"], weight
            )
        sender.end()
    assert not make_sender(Route(), 1, CPU).packs


def test_bytes_from_another_machine_land_in_this_ones_memory():
    sender, receiver, landing = (
        make_sender(Route(remote=True), 0, CPU),
        make_receiver(Route(), 1, CPU),
        HostBuffer(),
    )
    bucket = pack([("a", torch.arange(6.0))], 1, sender.allocate)
    announced = sender.announce(bucket)
    assert landing.local(announced) is announced  # the same machine: nothing to do
    away = replace(announced, where=announced.where | {"machine": "elsewhere", "path": "/nowhere"})
    landed = landing.local(away)
    assert landed.data is None and torch.equal(receiver.open(landed), bucket.data)
    with pytest.raises(RuntimeError, match="elsewhere were not sent"):
        landing.local(replace(away, data=None))


def run_in_threads(*calls):
    results = {}

    def run(number, call):
        try:
            results[number] = call()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[number] for number in range(len(calls))]


@pytest.fixture
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_a_broadcast_reaches_every_process_of_every_engine(loopback):
    """The group that stands over NCCL between GPUs, over gloo: two buckets, three receivers, in the
    order announced."""
    listener = socket.create_server(("127.0.0.1", 0))
    route = Route("nccl", port=listener.getsockname()[1], world_size=4, timeout=30)
    weights = [torch.randn(1000), torch.arange(7, dtype=torch.int64)]
    buckets = [
        pack([("a", w)], 1, lambda size: torch.zeros(size, dtype=torch.uint8)) for w in weights
    ]

    def send():
        sender = make_sender(route, 0, CPU, listener)
        for bucket in buckets:
            sender.announce(bucket)
            sender.deliver(bucket)
        return sender.packs

    def receive(rank):
        receiver = make_receiver(route, rank, CPU)
        announced = [
            SentBucket(bucket.manifest, {"size": bucket.data.numel()}) for bucket in buckets
        ]
        return [receiver.open(one) for one in announced]

    packs, *received = run_in_threads(
        send, *(lambda rank=rank: receive(rank) for rank in (1, 2, 3))
    )
    assert packs is True
    for got in received:
        assert all(
            torch.equal(data, bucket.data) for data, bucket in zip(got, buckets, strict=True)
        )
    assert not make_sender(route, 1, CPU).packs  # other ranks of the trainer stay out of the group


def test_a_group_that_does_not_come_together_says_who_is_missing(loopback):
    listener = socket.create_server(("127.0.0.1", 0))
    route = Route("nccl", port=listener.getsockname()[1], world_size=4, timeout=1)
    errors = run_in_threads(
        lambda: make_sender(route, 0, CPU, listener), lambda: make_receiver(route, 2, CPU)
    )
    assert "rank 1, 3 of the 4" in str(errors[0])


def test_the_meeting_listens_on_one_address_alone():
    worker = ModelWorker(WorkerContext("actor"), None)
    address, port = worker.open_rendezvous()
    assert worker._listener.getsockname() == (address, port) == ("127.0.0.1", port)


def test_ipc_fields_are_those_of_torch(monkeypatch):
    """What is picked out of torch's arguments and put back is what torch was going to send."""
    arguments = (
        "cls",
        (10,),
        (1,),
        2,
        "storage",
        torch.uint8,
        0,
        b"handle",
        12,
        256,
        False,
        b"counter",
        4,
        b"event",
        True,
    )
    monkeypatch.setattr(cuda_ipc, "reduce_tensor", lambda tensor: (None, arguments))
    fields = cuda_ipc.export(torch.arange(12, dtype=torch.uint8)[2:])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields)) == fields
    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", lambda *given: given)
    rebuilt = cuda_ipc.rebuild(fields, torch.device("cuda", 3))
    assert rebuilt[1:4] == arguments[1:4] and rebuilt[5] == torch.uint8 and rebuilt[6] == 3
    assert rebuilt[7:] == arguments[7:]


def test_rebuilding_takes_what_torch_takes():
    """Names and order of torch's parameters, on which picking by place depends."""
    names = cuda_ipc.rebuild_cuda_tensor.__code__.co_varnames[:15]
    assert names[cuda_ipc._FIELDS] == (
        "storage_handle",
        "storage_size_bytes",
        "storage_offset_bytes",
    )
    assert names[cuda_ipc._COUNTER] == (
        "ref_counter_handle",
        "ref_counter_offset",
        "event_handle",
        "event_sync_required",
    )
    assert names[1:7] == (
        "tensor_size",
        "tensor_stride",
        "tensor_offset",
        "storage_cls",
        "dtype",
        "storage_device",
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_replica_of_an_engine_keeps_a_complaint_to_itself(monkeypatch, replicas):
    """vLLM hands on what the first replica returns, and what any of them raises."""
    from openrl.rollout_engines import vllm_transfer, vllm_worker

    bucket = pack([("a", torch.ones(4))], 1, lambda size: torch.zeros(size, dtype=torch.uint8))
    message = SentBucket(bucket.manifest, {}, (checksum(torch.zeros(4)),)).message()
    transfer = object.__new__(vllm_transfer.BucketTransfer)
    transfer.device, transfer._receiver = (
        torch.device("cpu"),
        SimpleNamespace(open=lambda sent: bucket.data),
    )
    monkeypatch.setattr(vllm_worker, "set_current_vllm_config", lambda config: nullcontext())

    class Worker(vllm_worker.WorkerExtension):
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=replicas))
        weight_transfer_engine = transfer
        start_weight_update, update_weights = transfer.start_weight_update, transfer.update_weights

    if replicas == 1:
        report = Worker().openrl_load_weights([message], True, True)
        assert report == {"lost": [], "changed": ["a"], "absent": []}
    else:
        with pytest.raises(RuntimeError, match=r"^changed: a$"):
            Worker().openrl_load_weights([message], True, True)
