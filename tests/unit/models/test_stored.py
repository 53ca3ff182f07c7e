"""What the config and the headers of a stored model tell."""

import json

import pytest

from openrl.errors import UserError
from openrl.models.stored import check_language_model
from tests.tiny import tiny_model_dir


@pytest.mark.parametrize(("head", "writes"), [("GPT2LMHeadModel", True), ("GPT2Model", False)])
def test_an_old_config_that_calls_a_language_model_no_decoder(tmp_path, head, writes):
    """Early versions of transformers wrote is_decoder into every config."""
    path = tiny_model_dir(tmp_path, arch="gpt2")
    config = json.loads((path / "config.json").read_text())
    old = config | {"is_decoder": False, "architectures": [head]}
    (path / "config.json").write_text(json.dumps(old))
    if writes:
        check_language_model(str(path), False)
    else:
        with pytest.raises(UserError, match=f"is a {head}, which writes no text"):
            check_language_model(str(path), False)
