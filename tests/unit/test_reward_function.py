import asyncio
import math
import os
import re
import signal
import time
from pathlib import Path

import pytest

from openrl.config.reward import RewardFlags
from openrl.errors import UserError
from openrl.rewards.build import build_reward, check_reward_source, reward_file
from openrl.rewards.function import BadReply, read_scores
from openrl.types import Finish, Group, Prompt, Score, Trajectory
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def group(*responses, prompt="1 2:", label="3"):
    made = Prompt("train:7", TOKENIZER(prompt).input_ids, prompt, label)
    rows = []
    for response in responses:
        ids = TOKENIZER(response).input_ids
        tokens, mask = made.token_ids + ids, [False] * len(made.token_ids) + [True] * len(ids)
        rows.append(Trajectory(made, tokens, mask, [0.0] * len(tokens), Finish.STOP, text=response))
    return Group(made, rows)


def score(path, *groups, timeout=20.0, workers=1):
    """Scores of the groups by one reward object; the error of a group in the place of its scores."""

    async def run():
        flags = RewardFlags(remote_rm_url=str(path), reward_timeout=timeout, reward_num_workers=workers)
        reward = build_reward(flags, TOKENIZER)
        try:
            return await asyncio.gather(*(reward.score(g) for g in groups), return_exceptions=True)
        finally:
            await reward.close()

    return asyncio.run(run())


@pytest.fixture
def write(tmp_path):
    def write(body, name="reward_func", head=""):
        path = tmp_path / "reward.py"
        path.write_text(f"{head}\ndef {name}(queries, prompts, labels, **kwargs):\n    {body}\n")
        return path

    return write


def test_function_sees_decoded_text_and_labels(write):
    path = write(
        "return {'rewards': [float(q == p + '3<eos>') for q, p in zip(queries, prompts)],"
        " 'extra_logs': {'label': [float(x) for x in labels], 'empty': [float(kwargs == {})] * 2}}"
    )
    right, wrong = score(path, group("3<eos>", "4<eos>", label=5))[0]
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.parts == {"label": 5.0, "empty": 1.0}
    assert right.passed is None


def test_function_that_takes_responses_gets_them(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def mine(queries, prompts, labels, responses):\n    return [len(r) for r in responses]\n")
    assert [s.reward for s in score(f"{path}:mine", group("12", "1234"))[0]] == [2.0, 4.0]


def test_tensors_are_read_though_the_worker_has_no_torch_of_its_own(write):
    body = "import torch\n    return {'rewards': torch.tensor([[0.5], [1.5]]), 'scores': torch.tensor([0, 1])}"
    assert score(write(body), group("1", "2"))[0] == [Score(0.5, 0.0), Score(1.5, 1.0)]
    path = write("import sys\n    return [float('torch' in sys.modules)]")
    assert score(path, group("1"))[0] == [Score(0.0)]


def test_a_file_may_import_its_neighbours_and_print(write, tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 2.5")
    path = write("print('hello', flush=True)\n    return [VALUE]", head="from neighbour import VALUE")
    assert score(path, group("1"))[0] == [Score(2.5)]


def test_many_groups_over_several_processes_keep_their_order(write):
    groups = [group(*["1" * n, "2" * n], prompt=f"{n}:", label=n) for n in range(1, 20)]
    path = write("return [label + len(q) / 100 for q, label in zip(queries, labels)]")
    for n, scores in enumerate(score(path, *groups, workers=3), start=1):
        assert [s.reward for s in scores] == [pytest.approx(n + (len(f"{n}:") + n) / 100)] * 2


@pytest.mark.parametrize(
    ("values", "scores"),
    [
        ([1, 0.5], [Score(1.0), Score(0.5)]),
        ({"rewards": [1, 2], "scores": None}, [Score(1.0), Score(2.0)]),
        ({"rewards": [1, 2], "scores": [0, 1]}, [Score(1.0, 0.0), Score(2.0, 1.0)]),
        ({"rewards": [1, 2], "extra_logs": {"a": [3, None]}}, [Score(1.0, parts={"a": 3.0}), Score(2.0)]),
        ({"rewards": [1, 2], "extra_logs": [{"a": 3}, {"b": 4}]}, [Score(1.0, parts={"a": 3.0}), Score(2.0, parts={"b": 4.0})]),
    ],
)  # fmt: skip
def test_the_forms_of_a_reply(values, scores):
    assert read_scores(values, 2) == scores


def test_one_row_may_be_answered_by_bare_numbers():
    assert read_scores(0.5, 1) == [Score(0.5)]
    assert read_scores({"rewards": 1, "scores": 0, "extra_logs": {"a": 2}}, 1) == [Score(1.0, 0.0, {"a": 2.0})]


@pytest.mark.parametrize(
    ("values", "message", "row"),
    [
        ([1.0], "it returned 1 rewards for 2 rows", None),
        (0.5, "it returned 1 rewards for 2 rows", None),
        ({"reward": [1, 2]}, "it returned no 'rewards', but 'reward'", None),
        ([1.0, math.nan], "rewards must be finite, it returned nan", 1),
        ([-math.inf, 1.0], "rewards must be finite, it returned -inf", 0),
        ([None, 1.0], "rewards must be numbers, it returned None", 0),
        (["good", 1.0], "rewards must be numbers, it returned 'good'", 0),
        ({"rewards": [1, 2], "scores": [0, 1.5]}, "between 0 and 1, it returned 1.5", 1),
        ({"rewards": [1, 2], "scores": [0]}, "it returned 1 scores for 2 rows", None),
        ({"rewards": [1, 2], "extra_logs": {"a": [1]}}, "it returned 1 a for 2 rows", None),
        ({"rewards": [1, 2], "extra_logs": {"a": [1, math.nan]}}, "a must be finite", 1),
        ({"rewards": [1, 2], "extra_logs": [{}]}, "one dict for each of 2 rows", None),
    ],
)
def test_replies_that_are_no_scores(values, message, row):
    with pytest.raises(BadReply, match=re.escape(message)) as error:
        read_scores(values, 2)
    assert error.value.row == row


def test_an_exception_shows_the_row_and_the_line(write):
    path = write("return [1 / len(q.split('x')[1]) for q in queries]")
    (error,) = score(path, group("x1", "x", "xyz"))
    assert isinstance(error, UserError)
    assert "ZeroDivisionError: division by zero (reward.py, line 3)" in str(error)
    shown = [line.split(maxsplit=1) for line in str(error).splitlines()[1:]]
    assert shown == [["row", "train:7"], ["prompt", "'1 2:'"], ["label", "'3'"], ["response", "'x'"]]


def test_a_nan_shows_its_row_and_a_wrong_count_shows_all(write):
    path = write("return [float('nan') if q.endswith('4') else 1.0 for q in queries]")
    (error,) = score(path, group("3", "4"))
    assert "rewards must be finite, it returned nan" in str(error)
    assert "'4'" in str(error) and "response  '3'" not in str(error)
    (error,) = score(write("return [1.0]"), group("3", "4"))
    assert "it returned 1 rewards for 2 rows" in str(error)
    assert "response  '3'" in str(error) and "response  '4'" in str(error)


def test_a_hang_is_killed_with_its_children_and_the_next_call_works(write, tmp_path):
    body = (
        "import subprocess\n"
        "    if 'h' in queries[0]:\n"
        f"        child = subprocess.Popen(['sleep', '1000']); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "        while True: pass\n"
        "    return [1.0]"
    )
    hung, fine = score(write(body), group("h"), group("1"), timeout=3.0)
    assert "nothing came back within 3 s (--reward_timeout); the process was killed" in str(hung)
    assert "row       train:7" in str(hung)
    assert fine == [Score(1.0)]
    assert _is_gone(int((tmp_path / "pid").read_text()))


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
    assert message in str(crashed)
    assert fine == [Score(1.0)]


def test_the_event_loop_goes_on_while_a_reward_computes(write, tmp_path):
    """The function waits for a file that only the event loop writes: it would hang if the loop were blocked."""
    sign = tmp_path / "sign"
    path = write(f"import os\n    while not os.path.exists({str(sign)!r}): pass\n    return [1.0]")

    async def run():
        reward = build_reward(RewardFlags(remote_rm_url=str(path), reward_timeout=30.0), TOKENIZER)
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
    path = write(f"import os; open({str(sign)!r}, 'w').write(str(os.getpid()))\n    while True: pass")

    async def run():
        reward = build_reward(RewardFlags(remote_rm_url=str(path), reward_timeout=1000.0), TOKENIZER)
        task = asyncio.create_task(reward.score(group("1")))
        while not (sign.exists() and sign.read_text()):
            await asyncio.sleep(0.01)
        await reward.close()
        return await asyncio.gather(task, return_exceptions=True)

    (error,) = asyncio.run(run())
    assert "was killed by SIGKILL" in str(error)
    assert _is_gone(int(sign.read_text()))


def test_a_worker_ends_when_its_engine_dies(write, tmp_path):
    """Kill the parent in the middle of a call that never ends."""
    import subprocess
    import sys

    sign = tmp_path / "pid"
    path = write(f"import os; open({str(sign)!r}, 'w').write(str(os.getpid()))\n    while True: pass")
    program = (
        "from openrl.rewards.pool import RewardProcess; from openrl.rewards.build import reward_file;"
        "from openrl.rewards.worker import Rows;"
        f"RewardProcess(reward_file({str(path)!r}), 1000.0).call(Rows(['q'], ['p'], [''], ['r']))"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=root)
    deadline = time.monotonic() + 60
    while not (sign.exists() and sign.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert _is_gone(int(sign.read_text()))


def _is_gone(pid, within=20.0):
    """Whether the process has ended, or does so soon; a zombie that nobody reaped has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


def test_sources_are_checked_before_anything_starts(write, tmp_path):
    def problem(source):
        with pytest.raises(UserError) as error:
            check_reward_source(RewardFlags(remote_rm_url=str(source)))
        return str(error.value)

    assert "there is no file" in problem(tmp_path / "none.py")
    assert "is not a Python file" in problem("rewards.txt")
    path = write("return [1.0]", name="other")
    assert "it defines no function 'reward_func', but other" in problem(path)
    check_reward_source(RewardFlags(remote_rm_url=f"{path}:other"))
    path.write_text("import not_there")
    assert "ModuleNotFoundError: No module named 'not_there' (reward.py, line 1)" in problem(path)
    path.write_text("def reward_func(:")
    assert "SyntaxError" in problem(path)
    path.write_text("import os; os._exit(7)")
    assert "the reward process exited with status 7" in problem(path)
    check_reward_source(RewardFlags())


def test_reward_file_takes_an_optional_function(tmp_path):
    path = tmp_path / "a.py"
    path.touch()
    assert (reward_file(str(path)).path, reward_file(str(path)).function) == (path, "reward_func")
    assert reward_file(f"{path}:f").function == "f"
