"""Weights survive the trip bit for bit, whatever their types and shapes, and no bucket grows too
large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from openrl.weights.buckets import Bucket, WeightManifest, checksum, pack, split_into_buckets


def odd_weights() -> dict[str, Tensor]:
    """Sizes that leave the next tensor unaligned, every width of element, scalars, nothing, and a
    transposed view."""
    torch.manual_seed(0)
    return {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "double": torch.randn(2, 3, dtype=torch.float64),
        "half": torch.randn(5).to(torch.bfloat16),
        "scalar": torch.tensor(-0.0),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "transposed": torch.randn(4, 7).t(),
        "strided": torch.randn(9)[::2],
        "nan": torch.tensor([float("nan"), float("inf")], dtype=torch.float16),
        "trained": torch.nn.Parameter(torch.randn(3, 3)),
    }


def fill_buckets(
    weights: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int
) -> Iterator[Bucket]:
    for named in split_into_buckets(weights, bucket_bytes):
        yield pack(named, version, lambda size: torch.zeros(size, dtype=torch.uint8))


def same_bits(left: Tensor, right: Tensor) -> bool:
    as_bytes = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


@pytest.mark.parametrize("bucket_bytes", [1, 50, 10**6])
def test_round_trip(bucket_bytes: int) -> None:
    weights = odd_weights()
    buckets = list(fill_buckets(weights.items(), version=7, bucket_bytes=bucket_bytes))
    received = [pair for bucket in buckets for pair in bucket.tensors()]
    assert sorted(name for name, _ in received) == sorted(weights)
    assert all(same_bits(tensor, weights[name]) for name, tensor in received)
    assert {bucket.manifest.version for bucket in buckets} == {7}


def test_buckets_are_filled_before_they_go() -> None:
    """48 bytes are full with the third tensor of 16; one that is larger than a bucket overtakes
    those that wait."""
    sizes = [4, 4, 4, 4, 100, 4]
    weights = [(str(i), torch.zeros(n)) for i, n in enumerate(sizes)]
    buckets = list(fill_buckets(weights, version=1, bucket_bytes=48))
    assert [bucket.manifest.names for bucket in buckets] == [("0", "1", "2"), ("4",), ("3", "5")]
    assert [bucket.data.numel() for bucket in buckets] == [48, 400, 32]


@pytest.mark.parametrize("seed", range(20))
def test_never_more_buckets_than_bytes_ask_for(seed: int) -> None:
    """Whatever the sizes: at most ceil(bytes / bucket), none beyond twice the bucket but a single
    tensor."""
    sizes = torch.randint(1, 200, (50,), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes[::7] = [n * 10 for n in sizes[::7]]
    weights = [(str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate(sizes)]
    buckets = list(split_into_buckets(weights, 256))
    assert sorted(name for named in buckets for name, _ in named) == sorted(
        name for name, _ in weights
    )
    assert len(buckets) <= math.ceil(sum(sizes) / 256)
    assert all(len(named) == 1 or sum(t.nbytes for _, t in named) < 512 for named in buckets)


def test_filling_is_lazy() -> None:
    asked: list[int] = []

    def weights():
        for i in range(6):
            asked.append(i)
            yield str(i), torch.zeros(4)

    stream = fill_buckets(weights(), version=1, bucket_bytes=32)
    next(stream)
    assert asked == [0, 1]  # the second makes it full


def test_tensors_are_views() -> None:
    (bucket,) = fill_buckets(
        [("a", torch.zeros(3, dtype=torch.uint8)), ("b", torch.zeros(4))], 1, 100
    )
    named = dict(bucket.tensors())
    bucket.data[16:20] = torch.tensor([1.5]).view(torch.uint8)
    assert named["b"].tolist() == [1.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [15, 17])
def test_data_that_does_not_fit_its_manifest(size: int) -> None:
    bucket = Bucket(
        WeightManifest(1, ("a",), ("float32",), ((4,),)), torch.zeros(size, dtype=torch.uint8)
    )
    with pytest.raises(ValueError, match="does not hold"):
        list(bucket.tensors())


def slow_checksum(data: bytes) -> int:
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    return sum(word * (2 * place + 1) for place, word in enumerate(words)) % 2**64


def test_checksum_is_the_weighed_sum_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrl.weights.buckets._WORDS", 3)  # several parts
    for name, tensor in odd_weights().items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert checksum(tensor) == slow_checksum(data), name
    long = torch.randint(-(2**63), 2**63 - 1, (11,), generator=torch.Generator().manual_seed(0))
    assert checksum(long) == slow_checksum(long.numpy().tobytes())
    # begins inside a word
    assert checksum(long.view(torch.uint8)[3:]) == slow_checksum(long.numpy().tobytes()[3:])


def test_checksum_sees_bits_and_places() -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    flipped, exchanged = weights.clone(), weights.clone()
    flipped.view(torch.int16)[777] ^= 1
    exchanged[[0, 500]] = exchanged[[500, 0]]
    assert len({checksum(t) for t in (weights, flipped, exchanged)}) == 3
