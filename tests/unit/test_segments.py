"""A token row as it grows, against numbers worked out by hand."""

from openrl.token_origins import VersionSpan
from openrl.types import Image, PlacedImage, Segment


def test_a_row_grows_by_what_is_observed_and_what_is_sampled():
    """The second stretch goes on under the weights of the first one's end, so that their spans
    become one; what its spans say of tokens behind the last is left out."""
    image = PlacedImage(Image(b"", "0f"), 6, 7, (4,))
    row = Segment()
    row.observe([5, 9])
    row.sample([7, 8], [-1.0, -2.0], (VersionSpan(0, 1, 3), VersionSpan(1, 2, 4)))
    row.sample([1, 2], [-3.0, -4.0], (VersionSpan(0, 9, 4),))
    row.observe([6, 6], (image,))
    row.sample([3], [-5.0], (VersionSpan(0, 1, 4),))
    assert row == Segment(
        [5, 9, 7, 8, 1, 2, 6, 6, 3],
        [False, False, True, True, True, True, False, False, True],
        [0.0, 0.0, -1.0, -2.0, -3.0, -4.0, 0.0, 0.0, -5.0],
        (VersionSpan(2, 3, 3), VersionSpan(3, 6, 4), VersionSpan(8, 9, 4)),
        images=(image,),
    )


def test_an_empty_stretch_has_no_span_and_a_row_does_not_share_its_lists():
    prompt, logprobs = [5, 9], [-1.0]
    row = Segment.answer(prompt, [], [], (VersionSpan(0, 0, 3),))
    assert (row.token_ids, row.versions) == ([5, 9], ())
    row.sample([7], logprobs, ())
    assert (prompt, logprobs, row.rollout_logprobs) == ([5, 9], [-1.0], [0.0, 0.0, -1.0])
