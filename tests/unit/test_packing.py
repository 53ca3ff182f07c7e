"""Padded columns to one row of tokens and back, and the flag that asks for it."""

import torch

from openrl.config.commands import SFTConfig
from openrl.models.packing import arrange
from openrl.trainer import launch_supervised
from openrl.trainer.roles import model_spec, role_models
from openrl.trainer.supervised_tasks import task_of
from tests.tiny import tiny_tokenizer
from tests.unit.test_config_checks import ppo, settle


def test_rows_stand_end_to_end_and_come_back():
    ids = torch.tensor([[5, 6, 7], [8, 0, 0], [9, 4, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    rows = arrange(ids, mask, packing=True)
    assert rows.token_ids.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert rows.predicted.tolist() == [[False, True, True, False, False, True]]
    assert rows.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert rows.inputs["cu_seq_lens_q"].tolist() == rows.inputs["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
    assert rows.inputs["max_length_q"] == rows.inputs["max_length_k"] == 3
    assert torch.equal(rows.columns(rows.token_ids), ids)

    plain = arrange(ids, mask, packing=False)
    assert plain.token_ids is ids and not plain.inputs
    assert plain.predicted.tolist() == [[False, True, True], [False] * 3, [False, True, False]]
    assert torch.equal(plain.columns(ids + 1), (ids + 1) * mask)


def test_the_flag_reaches_every_model():
    words = "--pretrain m --prompt_data d --remote_rm_url r.py"
    for packing, more in ((True, " --packing_samples"), (False, "")):
        config = ppo(words + more)
        roles = role_models(config)
        assert {"actor", "critic", "reference"} <= roles.keys()
        assert all(model_spec(config, role, "cpu", 10).packing is packing for role in roles.values())
        config, _ = settle(SFTConfig, "--pretrain m --dataset d --output_key o" + more)
        task = task_of(config, tiny_tokenizer())
        assert launch_supervised.model_spec(config, task, "cpu", 10).packing is packing
