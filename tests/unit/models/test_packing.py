"""Padded columns to one row of tokens and back, and the flag that asks for it."""

import torch

from openrl.config.commands import SFTConfig
from openrl.models.packing import arrange
from openrl.trainer.supervised import launch as launch_supervised
from openrl.trainer.supervised.tasks import task_of
from openrl.workers.roles import model_specs
from tests.flags import ppo, settle
from tests.tiny import tiny_tokenizer


def test_rows_stand_end_to_end_and_come_back():
    ids = torch.tensor([[5, 6, 7], [8, 0, 0], [9, 4, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    rows = arrange(ids, mask, packing=True)
    assert rows.token_ids.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert rows.predicted.tolist() == [[False, True, True, False, False, True]]
    assert rows.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert (
        rows.inputs["cu_seq_lens_q"].tolist()
        == rows.inputs["cu_seq_lens_k"].tolist()
        == [0, 3, 4, 6]
    )
    assert rows.inputs["max_length_q"] == rows.inputs["max_length_k"] == 3
    assert torch.equal(rows.to_batch(rows.token_ids), ids)

    plain = arrange(ids, mask, packing=False)
    assert plain.token_ids is ids and not plain.inputs
    assert plain.predicted.tolist() == [[False, True, True], [False] * 3, [False, True, False]]
    assert torch.equal(plain.to_batch(ids + 1), (ids + 1) * mask)


def test_siblings_stand_behind_what_they_begin_with():
    """[5 6 7 | 7 8 | 7 9 4] and a row of another group: the last common token stands again before
    each row's own."""
    ids = torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 4], [5, 6, 3, 0, 0]])
    groups = torch.tensor([4, 4, 2])
    rows = arrange(ids, ids > 0, packing=True, groups=groups)
    assert rows.token_ids.tolist() == [[5, 6, 7, 7, 8, 7, 9, 4, 5, 6, 3]]
    assert rows.inputs["position_ids"].tolist() == [[0, 1, 2, 2, 3, 2, 3, 4, 0, 1, 2]]
    assert rows.predicted.long().tolist() == [[0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1]]
    assert rows.inputs["cu_seq_lens_q"].tolist() == [0, 3, 5, 8, 11]
    assert rows.inputs["cu_seq_lens_k"].tolist() == [0, 3, 7, 12, 15]
    assert rows.inputs["key_places"].tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10]
    assert (rows.inputs["max_length_q"], rows.inputs["max_length_k"]) == (3, 5)
    assert torch.equal(rows.to_batch(rows.token_ids), ids)
    assert torch.equal(rows.arranged(ids), rows.token_ids)
    assert rows.real(rows.token_ids[0]).tolist() == [5, 6, 7, 8, 5, 6, 7, 9, 4, 5, 6, 3]


def test_only_what_is_asked_for_is_predicted():
    ids = torch.tensor([[5, 6, 7], [8, 0, 0], [9, 4, 0]])
    asked = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 1]]).bool()  # also on padding
    for packing in (False, True):
        rows = arrange(ids, ids > 0, packing, scored=asked)
        assert rows.to_batch(rows.predicted).tolist() == [[False, False, True], *[[False] * 3] * 2]
        assert rows.to_batch(rows.token_ids).tolist() == [[5, 0, 7], [0, 0, 0], [0, 0, 0]]


def test_siblings_share_what_one_of_them_asks_for():
    """[5 6 7 1 | 1 8 | 1 9 4], of which the second row trains the 7: its column is the one that
    counts there."""
    ids = torch.tensor([[5, 6, 7, 1, 8, 0], [5, 6, 7, 1, 9, 4]])
    asked = torch.tensor([[0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 1]]).bool()
    rows = arrange(ids, ids > 0, True, torch.tensor([4, 4]), asked)
    assert rows.token_ids.tolist() == [[5, 6, 7, 1, 1, 8, 1, 9, 4]]
    assert rows.predicted.long().tolist() == [[0, 0, 1, 0, 0, 1, 0, 0, 1]]
    column = asked * torch.tensor([[10], [20]]) + asked
    assert (rows.arranged(column) * rows.predicted).tolist() == [[0, 0, 21, 0, 0, 11, 0, 0, 21]]
    assert torch.equal(rows.to_batch(rows.token_ids), ids * asked)


def test_siblings_apart_or_with_little_in_common_share_nothing():
    ids = torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0], [5, 6, 7, 3]])
    apart = arrange(ids, ids > 0, packing=True, groups=torch.tensor([1, 2, 1]))
    together = arrange(ids, ids > 0, packing=True, groups=torch.tensor([1, 1, 1]))  # not a token
    for rows in (apart, together):
        plain = arrange(ids, ids > 0, packing=True)
        assert torch.equal(rows.token_ids, plain.token_ids) and torch.equal(
            rows.predicted, plain.predicted
        )
        assert rows.inputs["key_places"].tolist() == list(range(10))
        assert (
            rows.inputs["cu_seq_lens_q"].tolist()
            == rows.inputs["cu_seq_lens_k"].tolist()
            == [0, 4, 6, 10]
        )


def test_the_flag_reaches_every_model():
    words = "--pretrain m --prompt_data d --remote_rm_url r.py"
    for packing, more in ((True, " --packing_samples"), (False, "")):
        config = ppo(words + more)
        models = model_specs(config, "cpu", 10)
        assert {"actor", "critic", "reference"} <= models.keys()
        assert all(spec.packing is packing for (spec,) in models.values())
        config, _ = settle(SFTConfig, "--pretrain m --dataset d --output_key o" + more)
        task = task_of(config, tiny_tokenizer())
        assert launch_supervised.trained_spec(config, task, "cpu", 10).packing is packing
