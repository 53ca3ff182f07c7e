"""Every preset is made of flags that exist, with values that they accept, and stands for its recipe."""

import pytest

from openrl.config.commands import PPOConfig
from openrl.config.correction import DynamicFilteringFlags
from openrl.config.presets import PRESETS
from openrl.extension_points import advantage_estimators, policy_losses
from openrl.flags.parser import read_request, resolve
from openrl.flags.schema import collect_flags, flags_of

SPECS = {spec.name: spec for spec in collect_flags(PPOConfig)}
FILTERING = {spec.name for spec in flags_of(DynamicFilteringFlags, part_name="filtering", section="")}


@pytest.mark.parametrize("name", PRESETS)
def test_flags_exist_and_belong_to_the_chosen_components(name):
    preset = PRESETS[name]
    for flag in preset.keys() - FILTERING:
        owner = SPECS[flag].owner
        assert owner is None or preset[owner.flag] in owner.names, flag


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "gigpo"])  # its rows are steps of agents
def test_presets_pass_every_check(name):
    words = ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "r.py", "--n_samples_per_prompt", "8"]
    for flag, value in PRESETS[name].items():
        if flag not in FILTERING:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    request = read_request(words)
    config, problems = resolve(PPOConfig, list(SPECS.values()), request.settings, False)
    assert [str(p) for p in [*request.problems, *problems]] == []
    assert config.algorithm.advantage_estimator == PRESETS[name]["advantage_estimator"]


def test_presets_name_known_components():
    for preset in PRESETS.values():
        assert preset["advantage_estimator"] in advantage_estimators.names()
        assert preset["policy_loss_type"] in policy_losses.names()
