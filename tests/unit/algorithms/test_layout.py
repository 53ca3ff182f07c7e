"""Which rank has which share of the rows, the sequences and the layers."""

import pytest

from openrl.experience import ParallelLayout


def test_eight_ranks_as_two_by_two_by_two():
    """Tensor-parallel ranks are next to each other, then the parts of a sequence, then the shards
    of rows."""
    found = [
        (at.dp_rank, at.sp_rank, at.tp_rank)
        for at in (ParallelLayout(rank, 8, 2, 2) for rank in range(8))
    ]
    assert found == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]


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
    layouts = [ParallelLayout(rank, world, sp, tp) for rank in range(world)]
    assert layouts[0].sequence_groups() == groups
    assert layouts[0].dp_size == world // (sp * tp)
    for at in layouts:
        own = next(group for group in groups if at.rank in group)
        assert own[at.sp_rank] == at.rank and len(own) == sp


def test_ranks_that_do_not_divide():
    with pytest.raises(ValueError, match=r"6 ranks are no multiple of sp 2 \* tp 2"):
        ParallelLayout(0, 6, 2, 2)
