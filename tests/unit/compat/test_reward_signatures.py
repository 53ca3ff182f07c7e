"""Reward functions in the shapes that other systems document run as they are, and see what they see
there."""

import asyncio

import pytest

from openrl.processes.worker import load_module
from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.signatures import make_scorer
from openrl.types import Score
from tests.unit.rewards.test_reward_function import group, score, values

ROWS = RewardRows(
    queries=["1+1= 2<eos>", "1+1= 3<eos>"],
    prompts=["1+1="] * 2,
    labels=["2"] * 2,
    responses=[" 2<eos>", " 3<eos>"],
    texts=[" 2", " 3"],
    token_ids=[[5, 6, 1], [5, 7, 1]],
    sources=["sums"] * 2,
    metas=[{"extra_info": {"index": 4}, "level": "easy"}] * 2,
    images=[[b"a file"], []],
)


# -- OpenRLHF: lists in, a dict of tensors out -----------------------------------------------------

OPENRLHF = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    # queries are prompts + responses, labels are answers; math functions cut the prompt off the query
    responses = [query[len(prompt):] if prompt in query else query for query, prompt in zip(queries, prompts)]
    reward = torch.tensor([float(label in response) for response, label in zip(responses, labels)])
    print("rewards", reward)
    return {"rewards": reward, "scores": reward, "extra_logs": {"math_accuracy": reward.mean()}}
"""


def test_openrlhf(tmp_path):
    """One number in extra_logs stands for every row: they call it with one row at a time."""
    (tmp_path / "math_reward.py").write_text(OPENRLHF)
    scores = score(tmp_path / "math_reward.py", group("2", "3", prompt="1+1=", label="2"))[0]
    assert scores == [
        Score(1.0, 1.0, {"math_accuracy": 0.5}),
        Score(0.0, 0.0, {"math_accuracy": 0.5}),
    ]


# -- EasyR1: dicts in, dicts out -------------------------------------------------------------------

EASYR1_BATCH = """
import re
from typing import Any

def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    if not isinstance(reward_inputs, list):
        raise ValueError("Please use `reward_type=batch` for this reward function.")
    scores = []
    for reward_input in reward_inputs:
        accuracy = float(reward_input["response"].strip() == reward_input["ground_truth"])
        format_score = float(re.fullmatch(" ?[0-9]", reward_input["response"]) is not None)
        overall = (1 - format_weight) * accuracy + format_weight * format_score
        scores.append({"overall": overall, "format": format_score, "accuracy": accuracy})
    return scores
"""
EASYR1_SEQUENTIAL = """
REWARD_NAME = "r1v"
REWARD_TYPE = "sequential"

def compute_score(reward_input, format_weight: float = 0.5):
    if not isinstance(reward_input, dict):
        raise ValueError("Please use `reward_type=sequential` for this reward function.")
    accuracy = 1.0 if reward_input["response"].strip() == reward_input["ground_truth"].strip() else 0.0
    return {"overall": accuracy - format_weight * reward_input["response_length"], "accuracy": accuracy}
"""
EASYR1_DAPO = """
def compute_score(reward_inputs, max_response_length: int, overlong_penalty_factor: float):
    return [
        {"overall": (score := 1.0 if r["ground_truth"] in r["response"] else -1.0), "accuracy": score,
         "overlong": overlong_penalty_factor * (r["response_length"] > max_response_length),
         "accuracy_normalized": 0.5 * (score + 1.0)}
        for r in reward_inputs
    ]
"""
EASYR1_EARLIER = """
def compute_score(predicts: list[str], ground_truths: list[str], format_weight: float = 0.1):
    return [{"overall": float(p.strip() == g), "format": 1.0} for p, g in zip(predicts, ground_truths)]
"""
EASYR1_EARLIEST = """
def compute_score(predict: str, ground_truth: str):
    return {"overall": float(predict.strip() == ground_truth), "format": 1.0}
"""

# -- verl: one solution at a time ------------------------------------------------------------------

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "sums":
        raise NotImplementedError(f"{data_source=}")
    correct = solution_str.strip() == ground_truth
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": solution_str, "index": extra_info["index"]}
"""
VERL_NUMBER = """
def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return score if solution_str.strip() == ground_truth else format_score
"""
VERL_KWARGS = """
def compute_score(solution_str, ground_truth, **kwargs):
    assert sorted(kwargs) == ["data_source", "extra_info"], kwargs
    return float(solution_str.strip() == ground_truth),  # a tuple: the first counts
"""
VERL_ASYNC = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return float(solution_str.strip() == ground_truth)
"""
VERL_BATCHED = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(s.strip() == g) for s, g in zip(solution_strs, ground_truths, strict=True)]
"""
VERL_GEO3K = """
def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    return (1.0 - format_score) * (predict_str.strip() == ground_truth) + format_score * 1.0
"""
VERL_PRIME_MATH = """
def compute_score(model_output: str, ground_truth: str):
    correct = model_output.strip() == ground_truth
    return correct, True, model_output  # the first counts
"""

# -- TRL: columns by their names
# -------------------------------------------------------------------------

TRL = """
def accuracy_reward(completions, solution, level, **kwargs):
    assert set(kwargs) == {"prompts", "completion_ids", "ground_truth", "answer", "extra_info"}, kwargs
    assert all(isinstance(ids, list) for ids in kwargs["completion_ids"])
    return [float(c.strip() == s) + l for c, s, l in zip(completions, solution, level, strict=True)]
"""


def test_trl(tmp_path):
    (tmp_path / "theirs.py").write_text(TRL)
    made = group("2", "3", prompt="1+1=", label="2", meta={"level": 0.5, "extra_info": {}})
    scores = score(f"{tmp_path}/theirs.py:accuracy_reward", made)[0]
    applies = {"not_applicable": 0.0}
    assert scores == [Score(1.5, parts=applies), Score(0.5, parts=applies)]


def test_a_row_that_a_function_of_trl_does_not_apply_to_gets_nothing_from_it(tmp_path):
    """TRL takes the sum of the functions that gave a number (nansum), and leaves an answer that
    none of them rates out of training. The mean of a function is of those that it rates."""
    code = "def f(completions, **kwargs):\n    return [None if c > '2' else float(c) for c in completions]\n"
    code += "def g(completions, **kwargs):\n    return [None if c > '3' else 5.0 for c in completions]\n"
    (tmp_path / "theirs.py").write_text(code)
    files = f"{tmp_path}/theirs.py:f,{tmp_path}/theirs.py:g"
    both, one, none = score(files, group("2", "3", "4", prompt="1+1=", label="2"))[0]
    f, g = (name for name, value in both.parts.items() if value in (2.0, 5.0))
    assert (both.reward, both.parts[f], both.parts[g]) == (7.0, 2.0, 5.0)
    assert one.reward == 5.0 and f not in one.parts and one.parts[f"{f}/not_applicable"] == 1
    assert none.dropped and none.failure == "no reward function rates this answer"
    assert f not in none.parts and none.parts[f"{g}/not_applicable"] == 1


def test_a_part_of_that_name_is_a_part_like_any_other(tmp_path):
    """Only a mark says that a function rates no answers of a kind."""
    code = "def reward_func(queries, prompts, labels):\n"
    code += "    return {'rewards': [2.0, 3.0], 'extra_logs': {'not_applicable': [1.0, 0.0]}}\n"
    for name in ("f", "g"):
        (tmp_path / f"{name}.py").write_text(code)
    files = f"{tmp_path}/f.py,{tmp_path}/g.py"
    one, other = score(files, group("2", "3", prompt="1+1=", label="2"))[0]
    assert (one.reward, one.parts["f"], other.reward) == (4.0, 2.0, 6.0)
    assert one.parts["g/not_applicable"] == 1 and not one.dropped


@pytest.mark.parametrize(
    ("code", "kwargs", "expected"),
    [
        (VERL_GEO3K, {}, [Score(1.0), Score(0.1)]),
        (VERL_PRIME_MATH, {}, [Score(1.0), Score(0.0)]),
        (EASYR1_BATCH, {}, [Score(1.0, 1.0, {"format": 1.0, "accuracy": 1.0}),
                            Score(0.1, 0.0, {"format": 1.0, "accuracy": 0.0})]),
        (EASYR1_BATCH, {"format_weight": 0.5}, [Score(1.0, 1.0, {"format": 1.0, "accuracy": 1.0}),
                                                Score(0.5, 0.0, {"format": 1.0, "accuracy": 0.0})]),
        (EASYR1_SEQUENTIAL, {}, [Score(0.0, 1.0, {"accuracy": 1.0}), Score(-1.0, 0.0, {"accuracy": 0.0})]),
        (EASYR1_DAPO, {"max_response_length": 1, "overlong_penalty_factor": 0.5},
         [Score(1.0, 1.0, {"accuracy": 1.0, "overlong": 0.5, "accuracy_normalized": 1.0}),
          Score(-1.0, 0.0, {"accuracy": -1.0, "overlong": 0.5, "accuracy_normalized": 0.0})]),
        (EASYR1_EARLIER, {}, [Score(1.0, None, {"format": 1.0}), Score(0.0, None, {"format": 1.0})]),
        (EASYR1_EARLIEST, {}, [Score(1.0, None, {"format": 1.0}), Score(0.0, None, {"format": 1.0})]),
        (VERL, {}, [Score(1.0, 1.0, {"acc": 1.0, "index": 4.0}), Score(-1.0, 0.0, {"acc": 0.0, "index": 4.0})]),
        (VERL_NUMBER, {"format_score": 0.25}, [Score(1.0), Score(0.25)]),
        (VERL_KWARGS, {}, [Score(1.0), Score(0.0)]),
        (VERL_ASYNC, {}, [Score(1.0), Score(0.0)]),
        (VERL_BATCHED, {}, [Score(1.0), Score(0.0)]),
    ],
)  # fmt: skip
def test_functions_of_other_systems(tmp_path, code, kwargs, expected):
    """The end-of-text token is not part of what they see, though the reward counts it among the
    tokens."""
    (tmp_path / "theirs.py").write_text(code)
    made = group(
        "2<eos>",
        "3<eos>",
        prompt="1+1=",
        label="2",
        source="sums",
        meta={"extra_info": {"index": 4}},
    )
    scores = score(f"{tmp_path}/theirs.py:compute_score", made, reward_func_kwargs=kwargs)[0]
    assert scores == [Score(pytest.approx(s.reward), s.passed, s.parts) for s in expected]


def test_one_row_that_raises_costs_no_second_call_of_the_others(tmp_path):
    (tmp_path / "theirs.py").write_text(VERL)
    made = group(
        "2", "3", prompt="1+1=", label="2", source="products", meta={"extra_info": {"index": 4}}
    )
    assert (
        values(score(tmp_path / "theirs.py", made)[0])
        == ["theirs: NotImplementedError: data_source='products' (theirs.py, line 4)"] * 2
    )


def test_what_each_signature_is_given():
    """EasyR1's inputs hold the other columns of the data too; verl's extra_info is the column of
    that name."""
    seen = []

    def see(reward_inputs):
        seen.extend(reward_inputs)
        return [{"overall": 0.0}] * len(reward_inputs)

    make_scorer(see, {}, None)(ROWS)
    assert seen[0] == {
        "prompt": "1+1=", "response": " 2", "response_length": 3, "ground_truth": "2",
        "extra_info": {"index": 4}, "level": "easy",
    }  # fmt: skip

    def look(queries, prompts, labels, images):
        return {"rewards": [float(len(files)) for files in images]}

    assert make_scorer(look, {}, None)(ROWS) == {"rewards": [1.0, 0.0]}

    def theirs(data_source, solution_str, ground_truth, extra_info):
        return {
            "score": 0.0,
            "same": (
                (data_source, solution_str, ground_truth, extra_info)
                == ("sums", " 2", "2", {"index": 4})
            ),
        }

    assert make_scorer(theirs, {}, None)(ROWS.pick([0]))["extra_logs"] == [{"same": 1.0}]

    def without(solution_str, ground_truth, extra_info):
        return {"score": 0.0, **extra_info}

    plain = RewardRows(**{**vars(ROWS.pick([0])), "metas": [{"level": 3}]})
    assert make_scorer(without, {}, None)(plain)["extra_logs"] == [{"level": 3.0}]


@pytest.mark.parametrize(
    ("function", "kwargs", "problem"),
    [
        (lambda a, b: 0, {}, "its parameters are (a, b), but must be those of"),
        (lambda queries, labels: 0, {"weight": 1}, "it takes no keyword argument weight"),
        (lambda queries, **kwargs: 0, {"labels": []}, "it takes no keyword argument labels"),
        (lambda reward_inputs, limit: 0, {}, "it needs limit: give them with --reward_func_kwargs"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(function, kwargs, problem):
    with pytest.raises(TypeError) as error:
        make_scorer(function, kwargs, None)
    assert problem in str(error.value)


def test_a_file_is_loaded_by_its_own_directory(tmp_path):
    (tmp_path / "helper.py").write_text("X = 3")
    (tmp_path / "mine.py").write_text("from helper import X")
    assert load_module(tmp_path / "mine.py", "mine").X == 3


def test_coroutines_run_outside_of_any_event_loop():
    async def compute_score(solution_str, ground_truth):
        return float(asyncio.get_running_loop().is_running())

    assert make_scorer(compute_score, {}, None)(ROWS.pick([0]))["rewards"] == [1.0]
