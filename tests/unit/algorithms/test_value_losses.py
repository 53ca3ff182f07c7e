import pytest
import torch

from openrl.algorithms.value_losses import clipped_value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "clipped"),
    [
        (1.0, 0.0, 2.0, 0.0, 0.5, None),  # no clip: half the square
        (1.0, 0.0, 2.0, 0.5, 1.125, 1),  # moved 1, counted as 0.5: (0.5 - 2)^2 / 2
        (1.0, 0.0, -1.0, 0.5, 2.0, 0),  # moved the wrong way: the plain error is larger
        (0.2, 0.0, 2.0, 0.5, 1.62, 0),  # inside the clip
    ],
)
def test_by_hand(value, old, target, clip, loss, clipped):
    columns = [torch.tensor([[x]]) for x in (value, old, target)]
    result = clipped_value_loss(*columns, clip)
    assert float(result.per_token) == pytest.approx(loss)
    assert [float(m) for m in result.metrics.values()] == ([] if clipped is None else [clipped])


def test_no_gradient_where_the_clip_holds():
    values = torch.tensor([[1.0, 0.2]], requires_grad=True)
    clipped_value_loss(
        values, torch.zeros(1, 2), torch.full((1, 2), 2.0), 0.5
    ).per_token.sum().backward()
    assert values.grad.tolist() == [[0.0, pytest.approx(-1.8)]]
