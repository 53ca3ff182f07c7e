"""How far engines and trainer may be apart after the first sync."""

import pytest
import torch

from openrl.errors import UserError
from openrl.weights.gap import check_gap


def test_gap_within_and_beyond_the_tolerance():
    trainer = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    one_off = trainer + torch.tensor([0.0, 0.0, 0.12, 0.0])  # mean 0.03
    assert check_gap(trainer + 9e-4, trainer, "fp32", 1) == pytest.approx(9e-4, rel=1e-3)
    assert check_gap(one_off, trainer, "bf16", 1) == pytest.approx(0.12)
    with pytest.raises(
        UserError,
        match=r"version 5 .* 0\.03 in the mean and 0\.12 at most .* -2\.8800, the trainer -3\.0000",
    ):
        check_gap(one_off, trainer, "fp32", 5)
    with pytest.raises(UserError, match=r"mean 0\.02"):
        check_gap(one_off, trainer, "fp16", 1)
    with pytest.raises(UserError, match="nan"):
        check_gap(torch.tensor([float("nan")]), torch.tensor([-1.0]), "bf16", 1)
    with pytest.raises(ValueError, match="cannot compare"):
        check_gap(torch.zeros(1), torch.zeros(2), "fp32", 1)
    with pytest.raises(UserError, match=r"no token was sampled.*\n.*--prompt_max_len"):
        check_gap(torch.zeros(0), torch.zeros(0), "fp32", 1)
