"""Teachers behind a server and teachers by data source, through the command."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.completions_server import completions_server
from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, played, ppo_flags, run_here
from tests.e2e.test_teacher import TAUGHT
from tests.marks import full_after
from tests.tiny import tiny_model_dir, tiny_tokenizer

pytestmark = pytest.mark.full

ONE = TAUGHT | {"temperature": 1.0, "max_steps": 1}
SIX = {"rollout_batch_size": 6, "train_batch_size": 24, "micro_train_batch_size": 24}
SOURCES = ("math", "code", "chat")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Every row has a hint and one of three sources."""
    task = make_task(tmp_path_factory.mktemp("task"), rows=24)
    path = task / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [r | {"hint": r["label"], "datasource": SOURCES[i % 3]} for i, r in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return task


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    return [tiny_model_dir(folder, seed=seed, initializer_range=0.2) for seed in (3, 4)]


def steps_of(task, out, **changes):
    assert run_here(ppo_flags(task, out, **ONE | changes), without_ray) == 0
    return metrics(out)


def learned(step):
    return {name: step[name] for name in step if name.startswith(("actor/teacher_", "actor/grad"))}


MODES = {
    "advantage": {},
    "jsd": {"teacher_topk": 5},
    "told more": {"teacher_prompt_key": "hint", "teacher_mode": "reverse_kl", "teacher_topk": 5},
}


@pytest.mark.parametrize("mode", full_after(1, MODES))
def test_a_server_teaches_what_its_model_does(task, teachers, tmp_path, mode):
    """The same model as a role of the run; a request that fails once is sent again."""
    changes = {"teacher_mode": mode} if mode != "told more" else {}
    changes |= MODES[mode]
    (here,) = steps_of(task, tmp_path / "here", teacher_pretrain=teachers[0], **changes)

    def refuse(request, number):
        return 503 if number == 3 else None

    with completions_server(teachers[0], refuse) as url:
        (there,) = steps_of(task, tmp_path / "there", teacher_url=url, **changes)
    assert there.pop("actor/teacher_retries") >= 1 and there.pop("actor/teacher_failures") == 0
    assert learned(there) == pytest.approx(learned(here), rel=1e-4, abs=1e-5)
    assert there["actor/untaught_share"] == 0


def test_a_row_that_the_server_refuses_has_no_teacher(task, teachers, tmp_path):
    """Those that begin with 0 are refused; what is left is taught."""

    def refuse(request, number):
        return 400 if number > 1 and request["prompt"][0] % 2 else None

    with completions_server(teachers[0], refuse) as url:
        (step,) = steps_of(task, tmp_path, teacher_url=url, teacher_mode="jsd", teacher_topk=5)
    assert 0 < step["actor/teacher_failures"] < 16
    assert step["actor/untaught_share"] == pytest.approx(step["actor/teacher_failures"] / 16)


@pytest.mark.parametrize(
    "server, changes, message",
    [
        ({"shift": 1}, {}, "a teacher of the policy's family"),
        ({"most": 2}, {"teacher_mode": "jsd", "teacher_topk": 5}, "--max-logprobs 5"),
        ({"refuse": lambda request, number: 401}, {}, "is its token right?"),
    ],
    ids=["other tokens", "fewer log-probs", "no token"],
)
def test_a_server_that_cannot_teach_is_refused_before_the_start(
    task, teachers, tmp_path, capsys, server, changes, message
):
    with completions_server(teachers[0], **server) as url:
        flags = ppo_flags(task, tmp_path, **ONE | {"teacher_url": url} | changes)
        assert run_here(flags, without_ray) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()


def test_each_source_has_its_teacher(task, teachers, tmp_path):
    """Two models, one of them behind a server; the third source has none. What is learned is the
    sum of what each teaches its rows."""
    routes = tmp_path / "routes.yaml"

    def step_with(name, table):
        routes.write_text(json.dumps(table))
        (step,) = steps_of(task, tmp_path / name, teacher_routing=routes, **SIX)
        return step

    first, second = (str(teacher) for teacher in teachers)
    with completions_server(teachers[1]) as url:
        both = step_with("both", {"math": {first: 1.0}, "code": {url: 0.5}})
    alone = step_with("alone", {"math": {first: 1.0}, "code": {second: 0.5}})
    assert both.pop("actor/teacher_failures") == both.pop("actor/teacher_retries") == 0
    assert learned(both) == pytest.approx(learned(alone), rel=1e-4, abs=1e-5)
    one = step_with("one", {"math": {first: 1.0}})
    other = step_with("other", {"code": {second: 0.5}})
    assert 0 < alone["actor/untaught_share"] < one["actor/untaught_share"] < 1
    taught = [1 - step["actor/untaught_share"] for step in (one, other, alone)]
    assert taught[0] + taught[1] == pytest.approx(taught[2])


def test_each_source_has_its_estimator(task, tmp_path):
    """With a KL in the reward, three estimators and a source that teaches nothing."""
    routes = tmp_path / "routes.yaml"
    routes.write_text(
        "math: {advantage_estimator: maxrl}\n"
        "code: {advantage_estimator: reinforce, gamma: 0.9, kl_weight: 0}\n"
        "chat: {rl_weight: 0}"
    )
    own = {"remote_rm_url": task / "reward.py", "label_key": "label", "init_kl_coef": 0.1}
    own |= {"advantage_estimator": "group_norm", "algo_routing": routes, "max_steps": 2}
    own |= {"whiten_advantages": "false"}
    steps = steps_of(task, tmp_path / "run", **SIX, **own)
    for answer in played(tmp_path / "run"):
        (weight,) = {answer["loss_weight"]}
        assert weight == (0.0 if answer["source"] == "chat" else 1.0)
        if answer["source"] == "code":  # the reward itself, discounted from the end
            (segment,) = answer["segments"]
            given = [
                a
                for a, mine in zip(segment["advantages"], segment["loss_mask"], strict=True)
                if mine
            ]
            last = answer["score"]["reward"]
            expected = [last * 0.9**k for k in reversed(range(len(given)))]
            assert given == pytest.approx(expected, abs=1e-5)
    assert all(step["perf/rows_left_out"] >= 8 / 24 - 1e-6 for step in steps)


TAUGHT_BY = ("server", "start", "other", "nobody")
HINTED = "{hint}:"


def logprobs_of(path, ids):
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_teachers_of_an_asynchronous_run_read_interrupted_answers(teachers, tmp_path):
    """Answers that go on under newer weights are taught by a server, the policy's start and another
    model, after a hint: in each step, the distance is that of the models themselves."""
    task = make_task(tmp_path, rows=60)
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    hints = {row["input"]: row["label"] * (i % 5 > 0) for i, row in enumerate(rows)}
    lines = [
        row | {"hint": hints[row["input"]], "datasource": TAUGHT_BY[i % 4]}
        for i, row in enumerate(rows)
    ]
    (task / "hints.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    models = {"server": teachers[0], "start": task / "model", "other": teachers[1]}
    asynchronous = {"async_train": True, "partial_rollout": True, "async_queue_size": 2}
    told = {"teacher_prompt_key": "hint", "teacher_template": HINTED + "{prompt}"}
    changes = TAUGHT | {
        "prompt_data": task / "hints.jsonl",
        "teacher_routing": task / "routes.yaml",
        "temperature": 1.0,
        "max_steps": 4,
        "generate_max_len": 24,
        "trace_sample_rate": 1,
        "full_determinism": False,
    }
    out = tmp_path / "run"
    with completions_server(teachers[0]) as url:
        routes = {"server": {url: 1}, "start": {"start": 1}, "other": {str(teachers[1]): 1}}
        (task / "routes.yaml").write_text(json.dumps(routes))
        assert run_here(ppo_flags(task, out, **changes | asynchronous | told), without_ray) == 0
    tokenizer, said = (
        tiny_tokenizer(),
        {name: partial(logprobs_of, models[name]) for name in models},
    )
    gaps, untaught, mixed = {}, {}, 0
    for answer in played(out):
        (segment,) = answer["segments"]
        ids, first = segment["token_ids"], segment["loss_mask"].index(True)
        hint, source = hints[tokenizer.decode(ids[:first])], answer["source"]
        untaught.setdefault(answer["step"], []).append(source == "nobody" or not hint)
        mixed += len(set(segment["versions"][first:])) > 1
        if untaught[answer["step"]][-1]:
            continue
        read = tokenizer(HINTED.format(hint=hint), add_special_tokens=False).input_ids + ids
        theirs = said[source](read)[range(len(read) - 1), read[1:]][-(len(ids) - first) :]
        gap = torch.tensor(segment["updates"][0]["logprobs"][first:]) - theirs
        gaps.setdefault(answer["step"], []).append(gap)
    steps = metrics(out)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert mixed > 0 and any(step["rollout/age_max"] > 0 for step in steps)
    for step in steps:
        expected = torch.cat(gaps[step["step"]]).mean().item()
        assert step["actor/teacher_kl"] == pytest.approx(expected, abs=1e-4)
        shares = untaught[step["step"]]
        assert step["actor/untaught_share"] == pytest.approx(sum(shares) / len(shares))
        assert step["actor/teacher_failures"] == step["actor/teacher_retries"] == 0
