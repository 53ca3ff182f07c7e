"""Every preset is made of flags that exist, with values that they accept, and gives way to what is
given."""

import pytest

from openrl.algorithms.credit import CreditSettings, compute_advantages
from openrl.algorithms.shaping import RunningMoments
from openrl.config.commands import PPOConfig
from openrl.config.presets import PRESETS
from openrl.flags.dump import dump_yaml
from openrl.flags.schema import collect_flags
from openrl.trainer.planning.start_lines import preset_lines
from tests.batches import outcome_batch
from tests.flags import said, settle

SPECS = {spec.name: spec for spec in collect_flags(PPOConfig)}
LEAST = "--pretrain m --prompt_data d --remote_rm_url r.py --n_samples_per_prompt 8"


@pytest.mark.parametrize("name", PRESETS)
def test_flags_exist_and_belong_to_the_chosen_components(name):
    preset = PRESETS[name]
    for flag in preset:
        spec = SPECS[flag]
        assert not spec.components or preset[spec.path[0]] in spec.components, flag


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass_every_check_and_take_effect(name):
    config, problems = settle(PPOConfig, f"{LEAST} --algo_preset {name}")
    assert problems == []
    (line,) = preset_lines(config)
    assert line.startswith(f"--algo_preset {name}: --") and "instead of" not in line


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_equals_its_flags_typed_out(name):
    words = LEAST
    for flag, value in PRESETS[name].items():
        words += f" --{flag} " + " ".join(map(str, value if isinstance(value, tuple) else [value]))
    assert dump_yaml(settle(PPOConfig, words)[0]) == dump_yaml(
        settle(PPOConfig, f"{LEAST} --algo_preset {name}")[0]
    ).replace(f"algo_preset: {name}", "algo_preset: null")


def test_what_is_given_wins_over_a_preset(tmp_path):
    (tmp_path / "run.yaml").write_text("algo_preset: grpo\ninit_kl_coef: 0.5\n")
    config, problems = settle(
        PPOConfig, f"{LEAST} --config {tmp_path / 'run.yaml'} --kl_estimator k2"
    )
    assert problems == []
    assert (config.kl.init_kl_coef, config.kl.kl_estimator, config.kl.use_kl_loss) == (
        0.5,
        "k2",
        True,
    )
    assert "--kl_estimator 'k2' (instead of 'k3')" in preset_lines(config)[0]


@pytest.mark.parametrize(
    "change",
    ["--init_kl_coef 0", "--advantage_estimator rloo --policy_loss_type gspo --eps_clip 1e-3"],
)
def test_what_a_changed_preset_leaves_idle_is_no_problem(tmp_path, change):
    """Nobody asked for it; nor does the dumped config, which loads again."""
    for name in ("grpo", "ppo", "topr"):
        config, problems = settle(
            PPOConfig, f"{LEAST} --algo_preset {name} --loss_agg_mode seq-mean-token-mean {change}"
        )
        assert problems == []
        (tmp_path / "run.yaml").write_text(dump_yaml(config))
        assert settle(PPOConfig, f"--config {tmp_path / 'run.yaml'}") == (config, [])


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_raft_trains_on_right_answers_alone(wrong):
    config, _ = settle(PPOConfig, f"{LEAST} --algo_preset raft_pp")
    options, scopes = config.options["advantage_estimator"], config.reward_norm_scopes
    plan = CreditSettings(
        config.algorithm.estimator, options, config.shaping, scopes, config.algorithm.whitens, 1024
    )
    batch, _ = compute_advantages(outcome_batch([1.0, wrong], [0, 0]), plan, 0.0, RunningMoments())
    assert batch.advantages.tolist() == [[0, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("value", ["{a: b}", "[[grpo]]", "[grpo, dapo]"])
def test_presets_that_are_no_names_are_refused(tmp_path, value):
    (tmp_path / "run.yaml").write_text(f"algo_preset: {value}\n")
    (problem,) = said(PPOConfig, f"{LEAST} --config {tmp_path / 'run.yaml'}")
    assert problem.startswith("--algo_preset: expected text or None, got ")
