"""What several contract tests begin with."""

import pytest

from openrl.training_engine.distributed import init_distributed
from tests.experience import ragged_batch
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def one_rank():
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)


@pytest.fixture(scope="module")
def batch():
    return ragged_batch()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("models"))
