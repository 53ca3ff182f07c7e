"""Attention functions of split sequences under the architectures of transformers: one rank, which
holds the whole as its part.

What several ranks make of it is in ``tests/invariance/test_sequence_parallel.py``.
"""

import pytest
import torch

from openrl.config.groups.deepspeed import ParallelFlags
from openrl.errors import UserError
from openrl.models.sequence_parallel import check_split, split_sequences
from openrl.models.trial import Trial
from openrl.training_engine.build import load_model
from openrl.training_engine.distributed import init_distributed, own_group
from tests.experience import engine_spec
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full


ULYSSES, RING = ParallelFlags(ulysses_size=2), ParallelFlags(ring_attn_size=2)
ARCHITECTURES = {
    "qwen3_moe": {},
    "phi3": {},
    "gpt2": {},  # learned positions
    # every second layer slides; scores are capped
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 32},
}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_part_that_is_the_whole(tmp_path, arch, packing):
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)
    path = tiny_model_dir(tmp_path, arch=arch, tied=False, **ARCHITECTURES[arch])
    for flags in (ULYSSES, RING) if packing else (ULYSSES,):
        model = load_model(engine_spec(path, packing=packing))
        model.split = split_sequences(model.hf, str(path), flags, own_group([[0]], 60))
        trial = Trial.of(model.hf.config, torch.float32)
        column = lambda ids, mask: model(ids, mask)[0]  # noqa: B023, E731
        if flags is RING and arch == "gemma2":
            with pytest.raises(
                UserError, match=r"--ring_attn_size: sequences of .* its attention has softcap"
            ):
                check_split(str(path), model, column, trial)
        else:
            check_split(str(path), model, column, trial)


def test_attention_outside_the_interface_is_refused(tmp_path):
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)
    path = tiny_model_dir(tmp_path, arch="bloom", tied=False)
    with pytest.raises(
        UserError, match=r"--ulysses_size: sequences of .* cannot be split: its attention is eager"
    ):
        split_sequences(load_model(engine_spec(path)).hf, str(path), ULYSSES, own_group([[0]], 60))
