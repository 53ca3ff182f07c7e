"""Reward files in processes of their own: what they see, how they may fail, what becomes of the
rows."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import UserError
from openrl.rewards.build import RewardSetup, build_reward, check_reward_sources
from openrl.token_origins import VersionSpan
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory
from tests.patience import PATIENCE, still_running
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def group(*responses, prompt="1 2:", label="3", source="default", meta=None):
    made = Prompt(
        "train:7", TOKENIZER(prompt).input_ids, prompt, label, source=source, meta=meta or {}
    )
    rows = []
    for response in responses:
        ids = TOKENIZER(response).input_ids
        segment = Segment.answer(made.token_ids, ids, versions=(VersionSpan(0, len(ids), 0),))
        rows.append(Trajectory(made, [segment], FinishReason.STOP, text=response))
    return PromptGroup(made, rows)


def reward_of(source, **flags):
    given = RewardFlags(
        **{"remote_rm_url": str(source), "reward_timeout": 20.0, "reward_num_workers": 1} | flags
    )
    return build_reward(RewardSetup(given, reward_plan(given)), TOKENIZER)


def score(source, *groups, **flags):
    """Scores of the groups by one reward object; the error of a group in the place of its
    scores."""

    async def run():
        reward = reward_of(source, **flags)
        try:
            return await asyncio.gather(*(reward.score(g) for g in groups), return_exceptions=True)
        finally:
            await reward.close()

    return asyncio.run(run())


def values(scores):
    """Rewards, and what is said of rows that have none."""
    return [s.failure if s.dropped else s.reward for s in scores]


@pytest.fixture
def write(tmp_path):
    def write(body, name="reward_func", head="", parameters="queries, prompts, labels, **kwargs"):
        path = tmp_path / "reward.py"
        path.write_text(f"{head}\ndef {name}({parameters}):\n    {body}\n")
        return path

    return write


# -- what a function sees and says -----------------------------------------------------------------


def test_function_sees_decoded_text_and_labels(write):
    path = write(
        "return {'rewards': [float(q == p + '3<eos>') for q, p in zip(queries, prompts)],"
        " 'extra_logs': {'label': [float(x) for x in labels], 'empty': [float(kwargs == {})] * 2}}"
    )
    right, wrong = score(path, group("3<eos>", "4<eos>", label=5))[0]
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.parts == {"label": 5.0, "empty": 1.0}
    assert right.passed is None


def test_special_tokens_may_be_left_out(write):
    path = write(
        "return [len(q) + len(r) / 100 for q, r in zip(queries, responses)]",
        parameters="queries, responses",
    )
    assert values(score(path, group("3<eos>"))[0]) == [10 + 6 / 100]
    assert values(score(path, group("3<eos>"), reward_skip_special_tokens=True)[0]) == [5 + 1 / 100]


def test_function_that_takes_responses_gets_them(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def mine(queries, prompts, labels, responses):\n    return [len(r) for r in responses]\n"
    )
    assert values(score(f"{path}:mine", group("12", "1234"))[0]) == [2.0, 4.0]


def test_tensors_are_read_though_the_worker_has_no_torch_of_its_own(write):
    body = (
        "import torch\n    return {'rewards': torch.tensor([[0.5], [1.5]]), 'scores':"
        " torch.tensor([0, 1])}"
    )
    assert score(write(body), group("1", "2"))[0] == [Score(0.5, 0.0), Score(1.5, 1.0)]
    path = write("import sys\n    return [float('torch' in sys.modules)]")
    assert score(path, group("1"))[0] == [Score(0.0)]


def test_a_file_may_import_its_neighbours_and_print(write, tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 2.5")
    path = write(
        "print('hello', flush=True)\n    return [VALUE]", head="from neighbour import VALUE"
    )
    assert score(path, group("1"))[0] == [Score(2.5)]


def test_many_groups_over_several_processes_keep_their_order(write):
    groups = [group(*["1" * n, "2" * n], prompt=f"{n}:", label=n) for n in range(1, 20)]
    path = write("return [label + len(q) / 100 for q, label in zip(queries, labels)]")
    for n, scores in enumerate(score(path, *groups, reward_num_workers=3), start=1):
        assert values(scores) == [pytest.approx(n + (len(f"{n}:") + n) / 100)] * 2


# -- rows that fail --------------------------------------------------------------------------------


def test_an_exception_costs_its_own_row_and_shows_the_line(write):
    path = write("return [1 / len(q.split('x')[1]) for q in queries]")
    assert values(score(path, group("x1", "x", "xyz"))[0]) == [
        1.0,
        "reward: ZeroDivisionError: division by zero (reward.py, line 3)",
        0.5,
    ]


def test_a_label_that_cannot_be_sent_costs_its_own_group(write):
    label = []
    for _ in range(5000):
        label = [label]
    path = write("return [1.0] * len(queries)")
    failed, scored = score(path, group("1", "2", label=label), group("1"))
    assert [("nested too deeply" in failure) for failure in values(failed)] == [True, True]
    assert values(scored) == [1.0]


def test_failed_rows_are_asked_for_once_more_and_counted(write, tmp_path):
    """The first call of all fails; the rows succeed when they are asked for by themselves."""
    sign = tmp_path / "sign"
    head = f"import os, pathlib\nSIGN = pathlib.Path({str(sign)!r})"
    path = write(
        "SIGN.touch() if (new := not SIGN.exists()) else None\n    return [1 / (1 - new)] *"
        " len(queries)",
        head=head,
    )
    assert score(path, group("1", "2"), group("3"))[0] == [
        Score(1.0, attempts=2),
        Score(1.0, attempts=2),
    ]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("zero", [1.0, 0.0]), ("drop", [1.0, "reward: rewards must be finite, it returned nan"])],
)
def test_what_becomes_of_a_row_without_reward(write, policy, expected):
    path = write("return [float('nan') if q.endswith('4') else 1.0 for q in queries]")
    fine, bad = score(path, group("3", "4"), reward_failure_policy=policy)[0]
    assert values([fine, bad]) == expected
    assert fine == Score(1.0)
    assert bad.failure == "reward: rewards must be finite, it returned nan" and bad.attempts == 2
    assert bad.dropped == (policy == "drop")


def test_a_failure_may_stop_the_run_and_shows_its_row(write):
    path = write("return [float('nan') if q.endswith('4') else 1.0 for q in queries]")
    (error,) = score(path, group("3", "4"), reward_failure_policy="fail")
    assert isinstance(error, UserError)
    lines = [line.split(maxsplit=1) for line in error.message.splitlines()]
    assert lines[0] == ["a", "reward failed: reward: rewards must be finite, it returned nan"]
    assert lines[1:] == [
        ["row", "train:7"],
        ["prompt", "'1 2:'"],
        ["label", "'3'"],
        ["response", "'4'"],
    ]


def test_a_wrong_count_costs_all_rows(write):
    message = "reward: it returned 3 rewards for 1 row"
    assert values(score(write("return [1.0] * 3"), group("3", "4"))[0]) == [message] * 2


def test_siblings_that_are_compared_stay_together(write):
    """Row by row each would be its own best; the second try compares them again."""
    body = (
        "best = max(map(len, queries))\n    return [1.0 if len(q) == best else float('nan') for q"
        " in queries]"
    )
    alone = score(write(body), group("1", "22"))[0]
    assert values(alone) == [1.0, 1.0]
    together = score(write(body, head="REWARD_TYPE = 'group'"), group("1", "22"))[0]
    assert values(together) == ["reward: rewards must be finite, it returned nan", 1.0]


def test_a_hang_is_killed_with_its_children_and_the_next_call_works(write, tmp_path):
    body = (
        "import subprocess\n    if any('h' in q for q in queries):\n        child ="
        f" subprocess.Popen(['sleep', '1000']); open({str(tmp_path / 'pid')!r},"
        " 'w').write(str(child.pid))\n        while True: pass\n    return [1.0] * len(queries)"
    )
    mixed, fine = score(write(body), group("h", "2"), group("1"), reward_timeout=2.0)
    assert values(mixed) == [
        "reward: nothing came back within 2 s (--reward_timeout); the process was killed",
        1.0,
    ]
    assert values(fine) == [1.0]
    assert not still_running([int((tmp_path / "pid").read_text())])


def test_memory_without_bound_is_killed(write, tmp_path):
    """A child process that eats counts too."""
    pid = tmp_path / "pid"
    eat = (
        f"import os; open({str(pid)!r}, 'w').write(str(os.getpid())); hoard = []\nwhile True:"
        " hoard.append(b'x' * 10**6)"
    )
    body = (
        "import subprocess, sys\n    if 'h' in queries[0]: subprocess.run([sys.executable, '-c',"
        f" {eat!r}])\n    return [1.0]"
    )
    eaten, fine = score(write(body), group("h"), group("1"), reward_memory_gb=0.3)
    assert (
        eaten[0].dropped
        and "GiB of memory, more than the 0.3 GiB allowed (--reward_memory_gb)" in eaten[0].failure
    )
    assert values(fine) == [1.0]
    assert not still_running([int(pid.read_text())])


@pytest.mark.parametrize(
    ("death", "message"),
    [
        ("os._exit(3)", "the reward process exited with status 3"),
        ("sys.exit(4)", "the reward process exited with status 4"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the reward process was killed by SIGSEGV"),
    ],
)
def test_a_crash_is_told_and_the_next_call_works(write, death, message):
    path = write(f"if 'h' in queries[0]: {death}\n    return [1.0]", head="import os, signal, sys")
    crashed, fine = score(path, group("h"), group("1"))
    assert values(crashed) == [f"reward: {message}"]
    assert values(fine) == [1.0]


# -- processes -------------------------------------------------------------------------------------


def test_processes_start_when_they_are_needed(write):
    async def run():
        reward = reward_of(write("return [1.0]"), reward_num_workers=16)
        processes = reward.sources["reward"]._pool._processes
        started = [sum(p._process is not None for p in processes)]
        for _ in range(3):  # one after the other
            await reward.score(group("1"))
            started.append(sum(p._process is not None for p in processes))
        await reward.close()
        return len(processes), started

    assert asyncio.run(run()) == (16, [0, 1, 1, 1])


def test_the_event_loop_goes_on_while_a_reward_computes(write, tmp_path):
    """The function waits for a file that only the event loop writes: it would hang if the loop were
    blocked."""
    sign = tmp_path / "sign"
    path = write(f"import os\n    while not os.path.exists({str(sign)!r}): pass\n    return [1.0]")

    async def run():
        reward = reward_of(path)
        task = asyncio.create_task(reward.score(group("1")))
        await asyncio.sleep(0)
        sign.write_text("go")
        try:
            return await task
        finally:
            await reward.close()

    assert asyncio.run(run()) == [Score(1.0)]


def test_close_ends_a_call_that_still_runs(write, tmp_path):
    sign = tmp_path / "pid"
    path = write(
        f"import os; open({str(sign)!r}, 'w').write(str(os.getpid()))\n    while True: pass"
    )

    async def run():
        reward = reward_of(path, reward_timeout=1000.0)
        task = asyncio.create_task(reward.score(group("1")))
        pid = await asyncio.to_thread(_pid_in, sign)
        await reward.close()
        return pid, await task

    pid, score = asyncio.run(run())
    assert values(score) == ["reward: the reward processes are closed"]
    assert not still_running([pid])


def test_a_worker_ends_when_its_engine_dies(write, tmp_path):
    """Kill the parent in the middle of a call that never ends."""
    sign = tmp_path / "pid"
    path = write(
        f"import os; open({str(sign)!r}, 'w').write(str(os.getpid()))\n    while True: pass"
    )
    program = (
        "from pathlib import Path; from openrl.processes.child import ChildProcess, Limits;"
        "from openrl.rewards.reward_rows import RewardRows; from openrl.rewards.worker import FileTarget;"
        f"target = FileTarget('reward', Path({str(path)!r}), None, {{}});"
        "rows = RewardRows(['q'], ['p'], [''], ['r'], ['r'], [[1]], ['s'], [{}], [[]]);"
        "ChildProcess(target, Limits(1000.0, 2**33, '', ''), 'reward').call(('reward', rows))"
    )
    root = Path(__file__).parents[3]
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=root)
    pid = _pid_in(sign)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert not still_running([pid])


def _pid_in(sign):
    """The process id that a reward function writes into this file, once it runs."""
    deadline = time.monotonic() + PATIENCE
    while not (sign.exists() and sign.read_text()):
        assert time.monotonic() < deadline, "the function was never called"
        time.sleep(0.01)  # polling a file of another process
    return int(sign.read_text())


# -- before anything starts ------------------------------------------------------------------------


def test_sources_are_checked_before_anything_starts(write):
    def problem(source, **flags):
        given = RewardFlags(remote_rm_url=str(source), **flags)
        with pytest.raises(UserError) as error:
            check_reward_sources(given, reward_plan(given).sources, ())
        return str(error.value)

    path = write("return [1.0]", name="other")
    assert "it defines no function 'reward_func', but other" in problem(path)
    given = RewardFlags(remote_rm_url=f"{path}:other")
    check_reward_sources(given, reward_plan(given).sources, ())
    assert "it takes no keyword argument" in problem(
        f"{path}:other", reward_func_kwargs={"prompts": 1}
    )
    path.write_text("import not_there")
    assert "ModuleNotFoundError: No module named 'not_there' (reward.py, line 1)" in problem(path)
    path.write_text("def reward_func(:")
    assert "SyntaxError" in problem(path)
    path.write_text("import os; os._exit(7)")
    assert "the reward process exited with status 7" in problem(path)
    path.write_text("def reward_func(rows): pass")
    assert (
        "its parameters are (rows), but must be those of reward_func(queries, prompts, labels"
        in problem(path)
    )
