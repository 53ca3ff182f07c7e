import json

from openrl.tracking.loggers import JsonlTracker
from openrl.tracking.samples import SampleLog
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory


def trajectory(prompt, text, score=None, end=FinishReason.STOP):
    return Trajectory(
        prompt,
        [Segment.answer([5, 9], [7, 2], [-0.5, -0.1])],
        end,
        text=text,
        score=score,
    )


def groups():
    a, b = (
        Prompt("train:0", [5, 9], "3 4 -> 7:", label="7"),
        Prompt("train:1", [5, 9], "1 1 -> 2:", label={"n": 2}),
    )
    return [
        PromptGroup(
            a,
            [
                trajectory(a, "3+4", Score(1.0, 1.0, {"format": 0.5})),
                trajectory(a, "3*4", Score(float("nan"))),
            ],
        ),
        PromptGroup(b, [trajectory(b, "1+1")]),
    ]


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_rollout_is_readable(tmp_path):
    SampleLog(tmp_path / "samples.jsonl", 1).log(4, groups())
    assert read(tmp_path / "samples.jsonl") == [
        {
            "step": 4, "prompt_id": "train:0", "source": "default", "prompt": "3 4 -> 7:", "response": "3+4", "label": "7",
            "reward": 1.0, "parts": {"format": 0.5}, "passed": 1.0, "finish": "stop", "tokens": 2, "turns": 1,
            "failure": None, "policy_versions": [],
        }
    ]  # fmt: skip


def test_every_prompt_is_shown_before_a_second_rollout_of_any(tmp_path):
    SampleLog(tmp_path / "samples.jsonl", 8).log(1, groups())
    assert [r["response"] for r in read(tmp_path / "samples.jsonl")] == ["3+4", "1+1", "3*4"]


def test_what_was_not_judged_is_null_and_nan_stays_visible(tmp_path):
    SampleLog(tmp_path / "samples.jsonl", 8).log(1, groups())
    rows = {r["response"]: r for r in read(tmp_path / "samples.jsonl")}
    assert rows["1+1"]["reward"] is None and rows["1+1"]["label"] == {"n": 2}
    assert rows["3*4"]["reward"] == "nan"


def test_failed_rewards_are_logged_beyond_the_limit(tmp_path):
    made = groups()
    made[0].trajectories[1].score = Score(float("nan"), failure="judge: it hung")
    made[1].trajectories[0].score = Score(0.0, failure="judge: it crashed")
    SampleLog(tmp_path / "samples.jsonl", 1).log(1, made)
    rows = read(tmp_path / "samples.jsonl")
    assert [(r["response"], r["reward"], r["failure"]) for r in rows] == [
        ("3+4", 1.0, None),
        ("1+1", 0.0, "judge: it crashed"),
        ("3*4", "nan", "judge: it hung"),
    ]


def test_a_sample_that_the_infrastructure_failed_says_why(tmp_path):
    made = groups()
    made[0].trajectories[0].finish_reason = FinishReason.ENGINE_ERROR
    made[0].trajectories[0].failure = "request 4 broke"
    SampleLog(tmp_path / "samples.jsonl", 0).log(1, made)
    (row,) = read(tmp_path / "samples.jsonl")
    assert (row["finish"], row["failure"]) == ("engine_error", "request 4 broke")


def test_resume_drops_the_samples_of_later_steps(tmp_path):
    first = SampleLog(tmp_path / "samples.jsonl", 1)
    for step in (1, 2, 3):
        first.log(step, groups())
    second = SampleLog(tmp_path / "samples.jsonl", 1, keep_until=2)
    second.log(3, groups())
    assert [r["step"] for r in read(tmp_path / "samples.jsonl")] == [1, 2, 3]


def test_halves_of_surrogate_pairs_are_written_as_escapes(tmp_path):
    """Users' code may name anything so: parts, failures, agents, sources, metrics."""
    half = "x\ud800"
    prompt = Prompt(half, [5, 9], "1", label=half, source=half)
    score = Score.failed(half)
    parts = Score(1.0, parts={half: 1.0}).parts
    played = trajectory(prompt, half, score)
    played.agent = ""
    lost = Trajectory(prompt, played.segments, FinishReason.STOP, failure=half, agent=half,
                      metrics={half: 1.0})  # fmt: skip
    texts = [
        prompt.id,
        prompt.source,
        *parts,
        score.failure,
        lost.failure,
        lost.agent,
        *lost.metrics,
    ]
    assert texts == ["x\\ud800"] * len(texts)
    log = SampleLog(tmp_path / "samples.jsonl", 1)
    log.log(1, [PromptGroup(prompt, [played])])
    (row,) = read(tmp_path / "samples.jsonl")  # which is UTF-8
    assert (row["label"], row["response"], row["failure"]) == (half, half, "x\\ud800")
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {f"reward/{half}": 1.0})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, f"reward/{half}": 1.0}]
    again = JsonlTracker(tmp_path / "metrics.jsonl", keep_until=1)  # a resume
    assert again.last_step == 1
