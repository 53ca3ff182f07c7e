"""Weights survive the trip bit for bit, whatever their types and shapes, and no bucket grows too large."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from openrl.errors import UserError
from openrl.types import WeightManifest
from openrl.weights.buckets import Bucket, fill_buckets
from openrl.weights.shared_memory import BucketFiles, open_bucket
from openrl.weights.sync import check_gap


def odd_weights() -> dict[str, Tensor]:
    """Sizes that leave the next tensor unaligned, every width of element, scalars, nothing, and a transposed view."""
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


def same_bits(left: Tensor, right: Tensor) -> bool:
    as_bytes = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


@pytest.mark.parametrize("bucket_bytes", [1, 50, 10**6])
def test_round_trip(bucket_bytes: int) -> None:
    weights = odd_weights()
    buckets = list(fill_buckets(weights.items(), version=7, bucket_bytes=bucket_bytes))
    received = [pair for bucket in buckets for pair in bucket.tensors()]
    assert [name for name, _ in received] == list(weights)
    assert all(same_bits(tensor, weights[name]) for name, tensor in received)
    assert {bucket.manifest.version for bucket in buckets} == {7}


def test_buckets_hold_what_fits() -> None:
    """48 bytes hold three tensors of 16; one that is larger than a bucket travels alone."""
    sizes = [4, 4, 4, 4, 100, 4]
    weights = [(str(i), torch.zeros(n)) for i, n in enumerate(sizes)]
    buckets = list(fill_buckets(weights, version=1, bucket_bytes=48))
    assert [bucket.manifest.names for bucket in buckets] == [("0", "1", "2"), ("3",), ("4",), ("5",)]
    assert [bucket.data.numel() for bucket in buckets] == [48, 16, 400, 16]


def test_filling_is_lazy() -> None:
    asked: list[int] = []

    def weights():
        for i in range(6):
            asked.append(i)
            yield str(i), torch.zeros(4)

    stream = fill_buckets(weights(), version=1, bucket_bytes=32)
    next(stream)
    assert asked == [0, 1, 2]  # the third shows that the first two are full


def test_tensors_are_views() -> None:
    (bucket,) = fill_buckets([("a", torch.zeros(3, dtype=torch.uint8)), ("b", torch.zeros(4))], 1, 100)
    named = dict(bucket.tensors())
    bucket.data[16:20] = torch.tensor([1.5]).view(torch.uint8)
    assert named["b"].tolist() == [1.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [15, 17])
def test_data_that_does_not_fit_its_manifest(size: int) -> None:
    bucket = Bucket(WeightManifest(1, ("a",), ("float32",), ((4,),)), torch.zeros(size, dtype=torch.uint8))
    with pytest.raises(ValueError, match="does not hold"):
        list(bucket.tensors())


def test_files_carry_buckets_and_vanish() -> None:
    weights = odd_weights()
    files = BucketFiles()
    messages = [files.put(bucket).message() for bucket in fill_buckets(weights.items(), 3, 64)]
    folder = Path(messages[0]["path"]).parent
    assert folder.stat().st_mode & 0o077 == 0  # nobody else's business
    received = dict(pair for message in messages for pair in open_bucket(message).tensors())
    assert received.keys() == weights.keys()
    assert all(same_bits(tensor, weights[name]) for name, tensor in received.items())
    files.clear()
    files.clear()
    assert not folder.exists()
    assert same_bits(received["transposed"], weights["transposed"])  # still mapped
    assert Path(files.put(next(fill_buckets(weights.items(), 4, 64))).path).exists()  # ready for the next sync
    files.clear()


def test_a_bucket_larger_than_shared_memory_goes_to_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("openrl.weights.shared_memory._SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = BucketFiles()
    (bucket,) = fill_buckets([("a", torch.ones(4))], 1, 100)
    file = files.put(bucket)
    assert tmp_path in Path(file.path).parents
    assert torch.equal(dict(open_bucket(file.message()).tensors())["a"], torch.ones(4))
    files.clear()


def test_gap_within_and_beyond_the_tolerance() -> None:
    trainer = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    one_off = trainer + torch.tensor([0.0, 0.0, 0.12, 0.0])  # mean 0.03
    assert check_gap(trainer + 9e-4, trainer, "fp32", 1) == pytest.approx(9e-4, rel=1e-3)
    assert check_gap(one_off, trainer, "bf16", 1) == pytest.approx(0.12)
    with pytest.raises(
        UserError, match=r"version 5 .* 0\.03 in the mean and 0\.12 at most .* -2\.8800, the trainer -3\.0000"
    ):
        check_gap(one_off, trainer, "fp32", 5)
    with pytest.raises(UserError, match=r"mean 0\.02"):
        check_gap(one_off, trainer, "fp16", 1)
    with pytest.raises(UserError, match="nan"):
        check_gap(torch.tensor([float("nan")]), torch.tensor([-1.0]), "bf16", 1)
    with pytest.raises(ValueError, match="cannot compare"):
        check_gap(torch.zeros(0), torch.zeros(0), "fp32", 1)
