"""Which rank has which share of the rows, the sequences and the layers."""

import pytest

from openrl.training_engine.distributed import ParallelLayout


@pytest.mark.parametrize(
    ("world", "sp", "tp", "groups"),
    [
        (4, 1, 1, [[0], [1], [2], [3]]),
        (4, 2, 1, [[0, 1], [2, 3]]),
        (4, 4, 1, [[0, 1, 2, 3]]),
        (4, 1, 2, [[0], [1], [2], [3]]),
        (8, 2, 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_ranks_that_hold_one_sequence(world, sp, tp, groups):
    """Tensor-parallel ranks are next to each other, then the parts of a sequence."""
    layout = ParallelLayout(0, world, sp, tp)
    assert layout.sequence_groups() == groups
    assert layout.dp_size == world // (sp * tp)


def test_ranks_that_do_not_divide():
    with pytest.raises(ValueError, match=r"6 ranks are no multiple of sp 2 \* tp 2"):
        ParallelLayout(0, 6, 2, 2)
