"""Rows with another beginning, by hand: what a teacher reads, and where its numbers belong."""

import torch

from openrl.algorithms.collate import collate
from openrl.algorithms.privileged import PrivilegedRows, privileged_contexts
from openrl.token_origins import KeptSets
from openrl.types import (
    FinishReason,
    Image,
    PlacedImage,
    PrivilegedContext,
    Prompt,
    PromptGroup,
    Score,
    Segment,
    Trajectory,
)

PAD = 0
TOLD = Prompt("0", [8, 8, 8, 5, 6], "")


def groups_of(*segments, told=TOLD):
    prompt = Prompt("0", [5, 6], "", privileged=told)
    played = Trajectory(prompt, list(segments), FinishReason.STOP, score=Score(1.0))
    return [PromptGroup(prompt, [played])]


def rows_of(groups):
    batch, contexts = collate(groups, PAD), privileged_contexts(groups)
    return contexts, PrivilegedRows.of(batch, contexts, PAD)


def test_the_rows_of_an_agent_begin_as_its_teacher_is_told():
    """The first row begins with the prompt, the second one says itself what stands in the place of
    its first three tokens; the third one holds the prompt nowhere."""
    first = Segment.answer([5, 6], [1, 2])
    first.observe([9])
    first.sample([3], [0.0], ())
    second = Segment.answer([4, 5, 6, 1], [7])
    second.privileged = PrivilegedContext(3, [4, 8, 5, 6])
    third = Segment.answer([7], [1])
    contexts, rows = rows_of(groups_of(first, second, third))
    assert contexts == [PrivilegedContext(2, TOLD.token_ids), second.privileged, None]
    assert rows.batch.token_ids.tolist() == [
        [8, 8, 8, 5, 6, 1, 2, 9, 3],
        [4, 8, 5, 6, 1, 7, PAD, PAD, PAD],
        [7, 1, PAD, PAD, PAD, PAD, PAD, PAD, PAD],
    ]
    assert rows.batch.lengths.tolist() == [9, 6, 2]
    trained = [row.nonzero()[:, 0].tolist() for row in rows.batch.loss_mask]
    assert trained == [[5, 6, 8], [5], [1]]  # nothing of what only the teacher is told
    numbers = torch.arange(27.0).view(3, 9, 1)
    back = rows.back(numbers)
    assert back[..., 0].tolist() == [
        [0, 0, 5, 6, 7, 8],
        [0, 0, 0, 13, 14, 15],
        [18, 19, 20, 21, 22, 23],
    ]


def test_a_shorter_beginning():
    _, rows = rows_of(groups_of(Segment.answer([5, 6], [1, 2]), told=Prompt("0", [8], "")))
    assert rows.batch.token_ids.tolist() == [[8, 1, 2]]
    assert rows.back(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[0, 0, 2, 3]]


def test_kept_sets_and_images_move_along():
    image = Image(b"", "0f")
    row = Segment.answer([5, 6], [1], kept=KeptSets.of([[1, 2]]))
    row.observe([4, 4], (PlacedImage(image, 3, 5, (4,)),))
    row.sample([3], [0.0], (), KeptSets.of([[3]]))
    shown = PlacedImage(Image(b"", "aa"), 0, 2, (4,))
    told = Prompt("0", [4, 4, 5, 6], "", images=(shown,))
    _, rows = rows_of(groups_of(row, told=told))
    assert rows.batch.images == [(shown, PlacedImage(image, 5, 7, (4,)))]
    assert rows.batch.kept == [KeptSets.of([[], [], [], [], [1, 2], [], [], [3]])]
