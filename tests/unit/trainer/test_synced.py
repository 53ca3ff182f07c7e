"""Models whose new weights vLLM does not take while it runs."""

import pytest
from transformers import AutoConfig

from openrl.errors import UserError
from openrl.trainer.planning.prepare import check_synced


def test_experts_that_would_stay_as_they_were_are_refused(tmp_path):
    for kind in ("gpt_oss", "qwen3_moe"):
        AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
    check_synced(str(tmp_path / "qwen3_moe"), False)
    with pytest.raises(UserError, match="new experts of gpt_oss"):
        check_synced(str(tmp_path / "gpt_oss"), False)
