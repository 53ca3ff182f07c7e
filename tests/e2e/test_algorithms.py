"""Every advantage estimator and every policy loss through the command, with the flags that a user
types.

Flags, checks, data, trainer, reports and files are the command's own in every case. Only the
processes are shared: they are started once, and get their first weights back before each case."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from openrl.extension_points import advantage_estimators, metric_names, policy_losses
from openrl.trainer.saving.checkpoints import SCHEMA_VERSION
from openrl.workers.roles import assign_roles
from tests.e2e.bench import Bench, started, without_ray
from tests.e2e.runs import make_task, metrics, played, ppo_flags, run_here, untimed

pytestmark = pytest.mark.full


SMALL = {
    "full_determinism": True,
    "rollout_batch_size": 4,
    "train_batch_size": 8,
    "micro_train_batch_size": 4,
    "generate_max_len": 8,
    "max_steps": 2,
    "lr_warmup_ratio": 0,
}
FULL_KL = {"kl_estimator": "full", "kl_full_topk": 5}
SUM = {"loss_agg_mode": "seq-mean-token-sum"}
REQUIRED = {"dro": {"dro_beta": 0.1}, "vespo": SUM, "luspo": SUM}
"""Options without a default; and an aggregation that fits, which some estimators do not suggest."""
OF_AGENTS = {"hierarchical"}  # estimators that compare the agents of an episode; here there is one


@dataclass
class Cases(Bench):
    """Trained roles get their first weights back before each run, which is quicker than to build
    them anew."""

    first: Path

    def __call__(self, out: Path, **changes: object) -> list[dict[str, float]]:
        """The metrics of each step, once exit code and artefacts are right."""
        steps = super().__call__(out, **(SMALL | changes))
        self.check_artefacts(out)
        return steps

    @contextlib.asynccontextmanager
    async def lend(self, config, device, optimizer_steps, stage):
        for role in ("actor", "critic"):
            await self.groups[role].call("load", str(self.first / role))
        yield assign_roles(config, self.groups)

    def check_artefacts(self, out: Path) -> None:
        names = (
            "model.safetensors",
            "config.yaml",
            "trace/index.jsonl",
            "summary.json",
            "report.html",
            "tokenizer.json",
        )
        assert all((out / name).stat().st_size for name in names)
        flags = yaml.safe_load((out / "config.yaml").read_text())
        assert (
            json.loads((out / "summary.json").read_text())["steps"]
            == flags["max_steps"]
            == metrics(out)[-1]["step"]
        )


@pytest.fixture(scope="module")
def bench(ray_address, tmp_path_factory):
    task, first = make_task(tmp_path_factory.mktemp("task")), tmp_path_factory.mktemp("first")
    flags = SMALL | FULL_KL | {"advantage_estimator": "gae", "ray_address": ray_address}
    with started(task, first / "out", **flags) as alive:
        for role in ("actor", "critic"):
            alive.runner.run(alive.groups[role].call("save", str(first / role)))
        yield Cases(alive.runner, task, alive.groups, alive.residency, first)


def check(steps: list[dict[str, float]]) -> None:
    assert [m["step"] for m in steps] == [1, 2]
    for m in steps:
        assert {
            "actor/policy_loss",
            "actor/grad_norm",
            "actor/kl",
            "mismatch/kl",
            "rollout/reward",
        } <= m.keys()
        assert all(abs(value) < 1e6 for value in m.values()), m  # finite, too
        assert m["actor/nonfinite_steps"] == 0
        assert m["actor/logprob_gap_max"] < 1e-3  # the engine follows the trainer from case to case


def pairs() -> list[tuple[str, str]]:
    """Every estimator with some loss, every loss with some estimator."""
    estimators = sorted({*advantage_estimators.names()} - OF_AGENTS)
    losses = policy_losses.names()
    return [
        (estimators[i % len(estimators)], losses[i % len(losses)])
        for i in range(max(len(estimators), len(losses)))
    ]


@pytest.mark.parametrize(("estimator", "loss"), pairs())
def test_every_estimator_and_every_policy_loss_trains(bench, tmp_path, estimator, loss):
    chosen = {"advantage_estimator": estimator, "policy_loss_type": loss}
    steps = bench(tmp_path, **chosen, **REQUIRED.get(loss, {}))
    check(steps)
    assert chosen.items() <= yaml.safe_load((tmp_path / "config.yaml").read_text()).items()
    assert ("critic/value_loss" in steps[0]) == (estimator == "gae")
    before, after = (load_file(d / "model.safetensors") for d in (bench.task / "model", tmp_path))
    assert any(not torch.equal(before[name], after[name]) for name in before)


ONE_STEP = {"train_batch_size": 16, "use_kl_loss": True, "kl_estimator": "k3"}


@pytest.mark.parametrize(
    "changes", [ONE_STEP, {"skip_old_logprob": "always"}, ONE_STEP | {"skip_old_logprob": "never"}]
)
def test_old_logprobs_from_the_update_the_engine_or_a_pass(bench, tmp_path, changes):
    check(bench(tmp_path, **changes))


KL_TERMS = [
    FULL_KL,
    {
        "use_kl_loss": True,
        "kl_loss_estimator": "full",
        "kl_full_topk": 5,
        "kl_loss_coef": 0.5,
        "init_kl_coef": 0,
    },
    {"use_kl_loss": True, "kl_loss_estimator": "k3+", "add_token_level_kl": True},
    {"log_ref_kl": True, "init_kl_coef": 0},
]


@pytest.mark.parametrize("changes", KL_TERMS)
def test_terms_of_the_kl(bench, tmp_path, changes):
    """In the reward, in the loss, in both, and only logged. Before the first update the policy is
    the reference; an update that measures it sees its later optimizer steps, too."""
    steps = bench(tmp_path, **changes)
    check(steps)
    in_update = "use_kl_loss" in changes or "log_ref_kl" in changes
    assert in_update or abs(steps[0]["actor/kl"]) < 1e-7
    assert abs(steps[1]["actor/kl"]) > 1e-7
    assert ("actor/kl_loss" in steps[1]) == changes.get("use_kl_loss", False)


@pytest.mark.parametrize(
    "changes", [ONE_STEP, {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "2"}]
)
def test_rollout_correction_in_the_loss(bench, tmp_path, changes):
    """In the update, and before it."""
    steps = bench(tmp_path, enable_vllm_is_correction=True, **changes)
    check(steps)
    assert steps[1]["mismatch/is_weight_mean"] == pytest.approx(1, abs=1e-2)
    assert steps[1].get("mismatch/rejected_sequences") == (0 if "rollout_rs" in changes else None)


CUT = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "enable_vllm_is_correction": True}


@pytest.mark.parametrize("changes", [CUT, CUT | FULL_KL, CUT | {"kept_ids_max": 10}])
def test_truncated_sampling_is_what_training_sees(bench, tmp_path, changes):
    """The engine's log-probs are the trainer's in every pass; sets that are too large leave it."""
    for m in bench(tmp_path, **changes):
        assert m["actor/logprob_gap_max"] < 1e-3 and abs(m["mismatch/kl"]) < 1e-4
        assert 1 < m["rollout/kept_ids"] < changes.get("kept_ids_max", 20)
        assert (0 < m["rollout/kept_ids_unknown"] < 1) == ("kept_ids_max" in changes)


def test_score_centering_reads_what_the_engine_sampled_from(bench, tmp_path):
    """The engine's distributions are the trainer's before an update, and come with every token."""
    for m in bench(tmp_path, policy_loss_type="score_centering", centering_topk=8, **ONE_STEP):
        assert abs(m["actor/rollout_kl"]) < 1e-4
        assert 0.05 < m["rollout/listed_mass"] < 1


NO_WEIGHT = {"centering_weight": "icepop", "centering_weight_range": (0, 1e-6)}


def test_lists_of_score_centering_are_replayed(bench, tmp_path):
    """The recorded lists train the same weights without an engine; after the first of a rollout's
    optimizer steps tokens have other weights than 1. Where all of them are 0, nothing moves: the
    mean under the engine has the weights, too."""
    changes = SMALL | {"rollout_backend": "hf", "policy_loss_type": "score_centering"}
    changes |= {"centering_topk": 8, "centering_weight": "tis", "init_kl_coef": 0}
    dumped = {"rollout_replay_dir": tmp_path / "rollouts"}

    def run(name, **more):
        flags = ppo_flags(bench.task, tmp_path / name, **changes | more)
        assert run_here(flags, without_ray) == 0
        return untimed(metrics(tmp_path / name)), load_file(tmp_path / name / "model.safetensors")

    steps, whole = run("whole", rollout_dump_dir=tmp_path / "rollouts")
    assert all(abs(m["actor/centering_weight"] - 1) > 1e-5 for m in steps)
    same, again = run("again", **dumped)
    assert all(ours.items() <= theirs.items() for ours, theirs in zip(same, steps, strict=True))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    still, _ = run("none", **dumped, **NO_WEIGHT)
    assert [m["actor/grad_norm"] for m in still] == [0, 0]


def test_difficulties_of_the_data_weigh_the_loss(bench, tmp_path):
    """All of one difficulty weigh 1 each, as without the flag; unequal ones do not."""
    rows = [json.loads(line) for line in (bench.task / "prompts.jsonl").read_text().splitlines()]

    def losses(name, **changes):
        # one optimizer step a rollout
        steps = bench(tmp_path / name, init_kl_coef=0, train_batch_size=16, **changes)
        return [m["actor/policy_loss"] for m in steps]

    def with_levels(name, levels):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(
                json.dumps(row | {"level": x}) + "\n" for row, x in zip(rows, levels, strict=True)
            )
        )
        return losses(name, prompt_data=path, difficulty_loss_weight=True, difficulty_key="level")

    equal, rising = (
        with_levels("equal", [0.5] * len(rows)),
        with_levels("rising", [i / 40 for i in range(len(rows))]),
    )
    assert equal[0] == pytest.approx(losses("plain")[0], abs=1e-6)
    assert abs(rising[0] - equal[0]) > 1e-4


# -- runs of several steps -------------------------------------------------------------------------


LAYOUTS = {
    9: (
        "learner.entropy.measured learner.entropy.stored learner.kl.coef learner.rewards.count"
        " learner.rewards.mean"
        " learner.rewards.squares rollouts.admitted rollouts.draws rollouts.dropped rollouts.filtered"
        " rollouts.prompts.data rollouts.prompts.epoch rollouts.prompts.position"
        " rollouts.prompts.seed rollouts.prompts.shuffle rollouts.prompts.size"
        " rollouts.slots rollouts.steps rollouts.tried_again step"
        " totals.eval_pass_after totals.eval_pass_before totals.eval_reward_after"
        " totals.eval_reward_before totals.samples totals.tokens untrained version"
    )
}
"""What state.json holds, by schema version. When it changes, raise SCHEMA_VERSION and add the new
layout here: an older checkpoint is to be refused, not half read."""


def leaves(value: object, path: str = "") -> list[str]:
    """Dotted names of what nested dicts hold."""
    if not isinstance(value, dict):
        return [path]
    return [
        leaf for name, item in value.items() for leaf in leaves(item, f"{path}.{name}".lstrip("."))
    ]


def test_supervised_rows_join_and_resume(bench, tmp_path):
    """Their loss falls, and a resume after step 2 goes on with the rows that come next; in another
    ZeRO stage too."""
    task = bench.task / "prompts.jsonl"
    changes = {
        "ptx_data": task,
        "output_key": "label",
        "ptx_coef": 1.0,
        "max_steps": 4,
        "save_steps": 2,
    }
    whole = bench(tmp_path / "whole", **changes)
    losses = [m["actor/ptx_loss"] for m in whole]
    assert len(losses) == 4 and losses[-1] < losses[0]
    stopped = tmp_path / "again/checkpoints/step_000002"
    shutil.copytree(tmp_path / "whole/checkpoints/step_000002", stopped)
    resumed = bench(tmp_path / "again", **changes, load_checkpoint=True)
    assert untimed(resumed) == untimed(whole[2:])
    shutil.copytree(stopped, tmp_path / "stage 3/checkpoints/step_000002")
    divided = bench(tmp_path / "stage 3", **changes, load_checkpoint=True, zero_stage=3)
    for name in ("actor/ptx_loss", "actor/policy_loss", "actor/grad_norm"):
        assert [m[name] for m in divided] == pytest.approx([m[name] for m in whole[2:]], rel=1e-5)


def test_a_resume_between_two_sendings_of_weights(bench, tmp_path):
    """Weights go out after every second step, and before the checkpoint of step 3, from which the
    resume starts."""
    changes = {
        "max_steps": 5,
        "save_steps": 3,
        "weight_sync_interval": 2,
        "enable_vllm_is_correction": True,
    }
    whole = bench(tmp_path / "whole", **changes)
    stopped = tmp_path / "again/checkpoints/step_000003"
    shutil.copytree(tmp_path / "whole/checkpoints/step_000003", stopped)
    resumed = bench(tmp_path / "again", **changes, load_checkpoint=True)
    assert [m["rollout/policy_version_min"] for m in whole] == [1, 1, 2, 3, 4]
    assert [m["rollout/steps_behind"] for m in whole] == [0, 1, 0, 0, 0]
    assert [m.get("sync/out_of_turn") for m in whole] == [None, None, 1, None, None]
    gaps = [m["actor/logprob_gap"] for m in whole]
    assert gaps[1] > 10 * max(gaps[0], *gaps[2:])  # an older policy; the others differ by rounding
    assert untimed(resumed) == untimed(whole[3:])


def test_a_resume_with_filtering_over_the_ends_of_passes(bench, tmp_path):
    """Stopped after step 2 and resumed: the same prompts, coefficient of the KL and weights as
    without the stop."""
    changes = {
        "max_steps": 4,
        "save_steps": 2,
        "max_samples": 10,
        "dynamic_filtering": True,
        "dynamic_filtering_reward_range": (0.1, 0.2),
        "use_kl_loss": True,
        "kl_estimator": "k3",
        "kl_target": 1e-4,
        "kl_horizon": 100,
    }
    whole = bench(tmp_path / "whole", **changes)
    stopped = tmp_path / "again/checkpoints/step_000002"
    shutil.copytree(tmp_path / "whole/checkpoints/step_000002", stopped)
    resumed = bench(tmp_path / "again", **changes, load_checkpoint=True)

    assert all(0 < m["filter/kept_share"] < 1 for m in whole)
    # the checkpoint is in a later pass
    assert sum(m["filter/generated_groups"] for m in whole[:2]) > 10
    assert len({m["kl_coef"] for m in whole}) == 4  # the controller acts in every step
    assert untimed(resumed) == untimed(whole[2:])
    states = [
        json.loads((tmp_path / run / "checkpoints/step_000004/state.json").read_text())
        for run in ("whole", "again")
    ]
    assert states[0]["rollouts"]["prompts"]["epoch"] > 1 and all(
        s["totals"].pop("seconds") for s in states
    )
    assert states[0] == states[1]
    assert sorted(leaves(states[0])) == LAYOUTS[SCHEMA_VERSION].split()
    expected, found = (
        load_file(tmp_path / run / "model.safetensors") for run in ("whole", "again")
    )
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_groups_are_replayed_and_resume(bench, tmp_path):
    """Groups of earlier steps train again beside the new ones, weighed by what has changed since;
    a resume after step 2 replays what the whole run did, and ends at the same bits."""
    changes = {
        "max_steps": 4,
        "save_steps": 2,
        "replay_groups": 2,
        "replay_max_age": 2,
        "enable_vllm_is_correction": True,
    }
    whole = bench(tmp_path / "whole", **changes)
    stopped = tmp_path / "again/checkpoints/step_000002"
    shutil.copytree(tmp_path / "whole/checkpoints/step_000002", stopped)
    resumed = bench(tmp_path / "again", **changes, load_checkpoint=True)
    assert untimed(resumed) == untimed(whole[2:])
    expected, found = (
        load_file(tmp_path / run / "model.safetensors") for run in ("whole", "again")
    )
    assert all(torch.equal(expected[name], found[name]) for name in expected)

    assert [m["replay/groups"] for m in whole] == [0, 2, 2, 2]
    assert whole[1]["replay/age_mean"] == 1 and whole[1]["rollout/age_max"] == 1
    assert whole[1]["replay/share"] == pytest.approx(2 / 6)
    assert [m["rollout/samples"] for m in whole] == [16] * 4  # nothing more is played
    steps = [[t for t in played(tmp_path / "whole") if t["step"] == n] for n in range(1, 5)]
    again = [t for t in steps[1] if t["tag"] == "replayed"]
    assert len(again) == 8
    for trajectory in again:
        (segment,) = trajectory["segments"]
        same = [t for t in steps[0] if t["prompt_id"] == trajectory["prompt_id"]]
        assert segment["token_ids"] in [t["segments"][0]["token_ids"] for t in same]
        for n in [n for n, trained in enumerate(segment["trained"]) if trained]:
            gap = segment["old_logprobs"][n] - segment["rollout_logprobs"][n]
            assert segment["weights"][n] == pytest.approx(min(max(math.exp(gap), 0.5), 5), rel=1e-5)
            assert segment["ages"][n] == 1
    gaps = {"train": [0.0], "replayed": [0.0]}
    for trajectory in steps[1]:
        (segment,) = trajectory["segments"]
        both = zip(segment["old_logprobs"] or (), segment["rollout_logprobs"], strict=False)
        gaps[trajectory["tag"]] += [abs(here - there) for here, there in both]
    assert max(gaps["train"]) < 1e-4 < max(gaps["replayed"])  # the policy has moved since


def test_the_critic_warms_up_alone(bench, tmp_path):
    """--freezing_actor_steps 0: step 1 leaves the actor bit for bit as it was; later steps train on
    their own rollouts."""
    changes = {
        "advantage_estimator": "gae",
        "save_steps": 1,
        "save_hf_ckpt": True,
        "max_ckpt_num": 0,
    }
    plain = bench(tmp_path / "plain", **changes, dual_clip=3, max_steps=2)
    elsewhere = {there: here for e in metric_names.entries() for there, here in e.component.items()}
    assert set(elsewhere.values()) <= plain[0].keys()
    assert all(plain[0][there] == plain[0][here] for there, here in elsewhere.items())
    steps = bench(tmp_path / "frozen", **changes, max_steps=3, freezing_actor_steps=0)
    before = load_file(bench.task / "model/model.safetensors")
    after = [
        load_file(tmp_path / f"frozen/checkpoints/step_00000{n}/hf/model.safetensors")
        for n in (1, 2, 3)
    ]
    assert all(torch.equal(before[name], after[0][name]) for name in before)
    assert all(
        not torch.equal(after[n][name], after[n + 1][name]) for n in (0, 1) for name in before
    )
    assert [("actor/policy_loss" in m, "critic/value_loss" in m) for m in steps] == [
        (False, True)
    ] + [(True, True)] * 2
    assert [m["rollout/policy_version_min"] for m in steps] == [1, 1, 2]
    # the actor's schedule counts its own optimizer steps: two for each rollout that it is trained
    # on, none for step 1
    assert [m["actor/lr"] for m in steps[1:]] == [m["actor/lr"] for m in plain]
    assert steps[0]["critic/lr"] == plain[0]["critic/lr"]
