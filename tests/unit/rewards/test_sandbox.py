"""Code of responses: what it may not do, and how its tests are read and judged. Every process is
real."""

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from openrl.errors import BadRow
from openrl.extension_points import verifiers
from openrl.rewards.verifiers import sandbox
from openrl.rewards.verifiers.base import Answer, Unavailable, read_options
from openrl.rewards.verifiers.program_cases import Case
from openrl.rewards.verifiers.programs import (
    CodeOptions,
    last_program,
    run_cases,
    same_output,
    same_value,
)
from openrl.rewards.verifiers.sandbox import RunLimits, run
from openrl.rewards.verifiers.sandbox_child import LANDLOCK_CREATE
from openrl.rewards.verifiers.system_calls import CLONE, OPENING, REFUSED
from tests.marks import full_after
from tests.patience import still_running

MB = 1 << 20
# 20 s: a busy machine does not change an outcome
LIMITS = RunLimits(seconds=20, memory=512 * MB, output=MB)
contained = pytest.mark.skipif(
    sys.platform != "linux", reason="the filter of system calls is Linux's"
)


def program(code, stdin="", **limits):
    return run({"mode": "program", "code": code}, RunLimits(**vars(LIMITS) | limits), stdin)


def test_a_program_reads_its_input_and_writes_its_output():
    ran = program("print(int(input()) + 1)", "41\n")
    assert (ran.outcome, ran.stdout, ran.message) == ("done", b"42\n", "")


def children():
    return {p.pid for p in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("code", "limits", "outcome"),
    [
        ("while True: pass", {"seconds": 0.5}, "timeout"),
        ("import time\ntime.sleep(60)", {"seconds": 0.5}, "timeout"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()",
            {"seconds": 0.5},
            "timeout",
        ),
        (
            "import signal\nsignal.signal(signal.SIGTERM, lambda *_: 0)\nwhile True: pass",
            {"seconds": 0.5},
            "timeout",
        ),
        ("rows = []\nwhile True: rows.append(bytes(10**7))", {"memory": 128 * MB}, "memory"),
        ("text = 'x' * 10**11", {}, "memory"),
        ("while True: print('x' * 1000)", {}, "output"),
        ("import ctypes\nctypes.string_at(0)", {}, "error"),  # the interpreter dies
        ("import os\nos._exit(1)", {}, "error"),
        ("def f(n): return f(n + 1)\nf(0)", {}, "error"),
        ("raise ValueError('no')", {}, "error"),
        ("def f(:", {}, "error"),
        ("exit(3)", {}, "error"),
        ("import sys\nprint(1)\nsys.exit()", {}, "done"),
    ],
)
def test_how_a_program_ends(code, limits, outcome):
    before = children()
    ran = program(code, **limits)
    assert ran.outcome == outcome, ran
    assert len(ran.stdout) <= LIMITS.output
    assert children() == before


@contained
@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n  if os.fork() == 0: os.setsid()",
        "import multiprocessing as m\nm.get_context('fork').Process(target=print).start()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.system('true') == 0 and print(1) or 1 / 0",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.killpg(os.getpgid(os.getppid()), 9)",
        "import signal, os\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
        "import socket\nsocket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import os\nos.setsid()",
        "import os\nos.memfd_create('x')",
        "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0): raise OSError('Error')",
        # a signal of any number to any process, once the pipe can be read
        "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "import fcntl\nfcntl.fcntl(1, fcntl.F_SETLEASE, 0)",
        "import fcntl\nfcntl.ioctl(1, 0x40086602, bytes(8))",  # a file's flags, as chattr does
        *(
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            f"if libc.{call} and ctypes.get_errno() == 1: raise OSError('Error')"
            for call in (
                "shmctl(0, 0, None)",
                "inotify_init1(0)",  # a user's processes share a few hundred
                "syncfs(1)",
            )
        ),
    ],
)
def test_what_is_refused(code):
    ran = program(code)
    assert ran.contained and ran.outcome == "error", ran
    assert "Error" in ran.message and "Connection" not in ran.message, ran.message


@contained
def test_files_are_never_changed(tmp_path, without_landlock):
    kept = tmp_path / "kept"
    kept.write_text("1")
    attempts = [
        f"open({str(kept)!r}, 'w')",
        f"open({str(kept)!r}, 'a')",
        f"open({str(tmp_path / 'new')!r}, 'x')",
        *(
            f"import os\nos.{call}"
            for call in (f"remove({str(kept)!r})", f"mkdir({str(tmp_path / 'd')!r})")
        ),
        *(
            f"import os\nos.{call}({str(kept)!r}, {last})"
            for call, last in [("chmod", 0), ("truncate", 0)]
        ),
        f"import os\nos.rename({str(kept)!r}, {str(tmp_path / 'x')!r})",
        f"import os\nos.symlink({str(kept)!r}, {str(tmp_path / 'x')!r})",
        "open('here', 'w')",
    ]
    for code in attempts:
        ran = program(code)
        assert (ran.outcome, ran.message.startswith("PermissionError")) == ("error", True), (
            code,
            ran,
        )
    assert program(f"print(open({str(kept)!r}).read())").stdout == b"1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.fixture
def without_landlock(monkeypatch, tmp_path_factory):
    """As on a kernel that has none: what the child may open is everything."""
    child = tmp_path_factory.mktemp("child") / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace("READABLE = (", 'READABLE = ("/", '))
    monkeypatch.setattr(sandbox, "CHILD", child)


def has_landlock():
    version = (
        ctypes.CDLL(None).syscall(LANDLOCK_CREATE, None, 0, 1) if sys.platform == "linux" else -1
    )
    return version > 0


@contained
@pytest.mark.skipif(not has_landlock(), reason="needs Landlock")
@pytest.mark.parametrize("path", [__file__, "/etc/passwd", "/proc/1/cmdline", "/root", "/tmp"])
def test_files_besides_pythons_cannot_be_opened(path):
    ran = program(f"import os\nos.open({path!r}, os.O_RDONLY)")
    assert ran.outcome == "error" and "Permission" in ran.message, ran
    assert program("import numpy\nprint(numpy.ones(2).sum())").stdout == b"2.0\n"


@contained
@pytest.mark.parametrize("file", ["mem", "environ", "maps"])
@pytest.mark.parametrize("landlock", [True, False])
def test_the_judge_cannot_be_read(request, file, landlock):
    """Its memory holds the expected output, its environment keys. Without Landlock too."""
    if not landlock:
        request.getfixturevalue("without_landlock")
    ran = program(f"import os\nopen(f'/proc/{{os.getppid()}}/{file}', 'rb').read(1)")
    assert ran.outcome == "error" and "Permission" in ran.message, ran
    ran = program("import os\nprint(open(f'/proc/{os.getppid()}/stat').read()[:1].isdigit())")
    assert landlock or ran.stdout == b"True\n"  # the place is right


# x86-64, arm64
HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")


@pytest.mark.skipif(not all(map(os.path.exists, HEADERS)), reason="needs the headers of the kernel")
def test_system_calls_have_the_numbers_of_the_kernel():
    defined = [
        {
            name: int(n)
            for name, n in re.findall(
                r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()
            )
        }
        for header in HEADERS
    ]
    for name, numbers in {
        **REFUSED,
        "clone": CLONE,
        "open": OPENING[0][0],
        "openat": OPENING[1][0],
    }.items():
        for number, known in zip(numbers, defined, strict=True):
            assert number == known.get(name, number), name  # older headers lack the newest calls


@contained
def test_threads_are_not_processes():
    code = "import threading\nt = threading.Thread(target=print, args=[7])\nt.start()\nt.join()"
    assert program(code).stdout == b"7\n"


@contained
def test_threads_without_number_are_killed():
    """Those of C take little of the memory that is limited, and all of the machine's ids."""
    code = """
import ctypes
libc = ctypes.CDLL(None)
small, thread = ctypes.create_string_buffer(64), ctypes.c_ulong()
libc.pthread_attr_init(small)
libc.pthread_attr_setstacksize(small, ctypes.c_size_t(16384))
for _ in range(5000):
    libc.pthread_create(ctypes.byref(thread), small, libc.pause, None)
libc.pause()
"""
    ran = program(code)
    assert (ran.contained, ran.outcome) == (True, "error"), ran


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("OPENRL_RM_TOKEN", "secret")
    ran = program("import os\nprint(sorted(os.environ), os.getcwd())")
    assert ran.stdout == b"['HOME', 'LC_ALL', 'OPENBLAS_NUM_THREADS', 'PATH'] /\n"


def test_a_run_that_is_interrupted_leaves_nothing(tmp_path):
    """The signal comes while the program runs: the pool kills what takes too long."""
    before = children()
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            program("while True: pass")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert children() == before


@contained
def test_a_judge_that_is_killed_leaves_no_directory(tmp_path):
    """What takes too long is killed by the pool, with the process that waits for it."""
    call = f"""
from openrl.rewards.verifiers.sandbox import RunLimits, run
run({{"mode": "program", "code": "import time; time.sleep(1000)"}}, RunLimits(1000, {LIMITS.memory}, 1000))
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    root = Path(__file__).parents[3]
    waiting = psutil.Popen([sys.executable, "-c", call], cwd=root, env=environment)
    try:
        while not [p for p in waiting.children() if in_force(p)]:
            assert waiting.poll() is None
    finally:
        waiting.kill()
        waiting.wait()
    assert list(tmp_path.iterdir()) == []


def in_force(process):
    """Whether the filter is: the code runs."""
    return "Seccomp:\t2" in Path(f"/proc/{process.pid}/status").read_text()


@contained
def test_the_code_dies_with_the_process_that_waits_for_it():
    """The pool kills its workers, and the code runs in a session of its own."""
    call = f"""
from openrl.rewards.verifiers.sandbox import RunLimits, run
run({{"mode": "program", "code": "import time; time.sleep(1000)"}}, RunLimits(1000, {LIMITS.memory}, 1000))
"""
    waiting = psutil.Popen([sys.executable, "-c", call], cwd=Path(__file__).parents[3])
    try:
        while not (running := [p for p in waiting.children() if in_force(p)]):
            assert waiting.poll() is None
    finally:
        waiting.kill()
        waiting.wait()
    assert not still_running(running)


def test_without_an_interpreter_there_is_no_verdict(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="cannot start an interpreter"):
        program("print(1)")


# -- the verifier ----------------------------------------------------------------------------------

ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"


def fenced(code, language="python"):
    return f"Here it is:\n```{language}\n{code}\n```\nDone."


def verdict(response, label, meta=None, **options):
    answer = Answer("", response, label, meta=meta or {})
    return verifiers["code"].component(answer, read_options("code", {"timeout": 20} | options))


@pytest.mark.parametrize(
    ("code", "label", "meta"),
    [
        (SUM, {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}, {}),
        (SUM, json.dumps({"inputs": [["1 2"]], "outputs": [["3"]]}), {}),
        # verl, TACO
        (ADD, {"inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"], "fn_name": "add"}, {}),
        (ADD, {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, {}),  # APPS
        # LiveCodeBench
        (SUM, [{"input": "1 2", "output": "3", "testtype": "stdin"}], {"func_name": "add"}),
        (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional"}], {"func_name": "add"}),
        (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"], {}),  # MBPP
        (ADD, {"assert_case": ["assert add(1, 2) == 3"]}, {}),
        # ROLL
        (ADD, [{"assert_code": "from solution import add\n\ndef test_one():\n    assert add(1, 2) == 3\n"}], {}),
        ("class Solution:\n    def total(self, a: List[int]) -> int:\n        return reduce(add, a)\nfrom operator import add",
         {"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "total"}, {}),  # LeetCode
        ("def inverse(d): return {v: k for k, v in d.items()}", {"inputs": [[{"1": "a"}]], "outputs": [{"a": 1}], "fn_name": "inverse"}, {}),
    ],
)  # fmt: skip
def test_shapes_of_tests(code, label, meta):
    found = verdict(fenced(code), label, meta)
    assert (found.reward, found.passed, found.parts["passed_share"]) == (1, 1, 1)
    broken = verdict(
        fenced(
            code.replace("sum", "max")
            .replace("a + b", "a")
            .replace("reduce(add, a)", "0")
            .replace("v: k", "k: v")
        ),
        label,
        meta,
    )
    assert (broken.reward, broken.passed) == (0, 0)


def test_cases_are_judged_one_by_one():
    code = (
        "n = int(input())\nif n == 2: 1 / 0\nif n == 3:\n    while True: pass\nif n == 4: import"
        " os; os._exit(0)\nprint(n)"
    )
    cases = [Case("program", str(n), str(n)) for n in (1, 2, 3, 4, 5)]
    outcomes = [r.outcome for r in run_cases(code, cases, CodeOptions(timeout=2))]
    assert outcomes == ["passed", "error", "timeout", "wrong", "passed"]
    label = {"inputs": ["1", "2", "5", "4"], "outputs": ["1", "2", "5", "4"]}
    found = verdict(fenced(code), label, partial=True)
    assert (found.reward, found.passed) == (0.5, 0)
    assert found.parts == {
        "passed_share": 0.5, "has_code": 1, "error_share": 0.25, "timeout_share": 0, "contained": float(sys.platform == "linux"),
    }  # fmt: skip
    assert verdict(fenced(code), label, max_cases=1).reward == 1


def test_cases_that_no_time_is_left_for_have_failed():
    """A slow answer must not outlive --reward_timeout: then it would have no verdict instead of a
    bad one."""
    found = verdict(
        fenced("while True: pass"), {"inputs": ["1"] * 50, "outputs": ["1"] * 50}, total_timeout=0.5
    )
    assert (found.reward, found.parts["timeout_share"]) == (0, 1)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",  # ends well before the asserts
        "import sys\nsys.exit(0)",
        "def add(a, b):\n    raise SystemExit",
        "import builtins\nbuiltins.AssertionError = ValueError\ndef add(a, b): return 0",
        "print('passed')",
    ],
)
def test_ending_early_is_not_passing(code):
    assert verdict(fenced(code), ["assert add(1, 2) == 3"]).reward == 0


# The module leaves its server and answers for itself: it offers builtins, and 0 for every call.
ANSWERS = """
import os, sys
link = int(sys.argv[3])
add, absolute = ({"tuple": [name, {"theirs": 1}]} for name in ("add", "abs"))
builtins = {"tuple": ["__builtins__", {"dict": [absolute]}]}
reply = json.dumps([False, {"dict": [add, absolute, builtins]}])
while True:
    os.write(link, reply.encode() + b"\\n")
    if not os.read(link, 10000):
        os._exit(0)
    reply = "[false, 0]"
"""
EQUAL = "class All:\n    def __getattr__(self, name): return lambda *_: True\n"
EQUAL += "".join(
    f"    def __{name}__(self, *_): return {value}\n"
    for name, value in [
        *((name, True) for name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "contains")),
        *((name, "self") for name in ("sub", "rsub", "add", "abs", "round", "getitem", "call")),
        *(("len", 3), ("hash", 0), ("iter", "iter([self])"), ("float", 3.0), ("int", 3)),
    ]
)


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 3",
        "assert 3 == add(1, 2)",
        "assert add(1, 2) in (3, 4)",
        "assert abs(add(1, 2) - 3) < 1e-6",
        "from solution import *\nassert abs(add(1, 2) - 3) < 1e-6",
        "assert all(map(lambda case: add(*case) == 3, [(1, 2)]))",
        "assert 2 < add(1, 2) < 4",
        "assert [add(1, 2)] == [3]",
        "assert sorted([add(1, 2)]) == [3]",
        "assert set([add(1, 2)]) == {3}",
        "import math\nassert math.isclose(add(1, 2), 4)",
        "def test_it():\n    assert add(1, 2) == 3",
        "from solution import add\nassert add(1, 2) == 3",
    ],
)
@pytest.mark.parametrize(
    "code",
    full_after(
        3,
        [
            f"{EQUAL}def add(a, b): return All()",
            f"{EQUAL}add = All()",
            f"import json\n{ANSWERS}",
            "def add(a, b): raise StopIteration",
            "def abs(x): return 0\ndef add(a, b): return 9",
            "import builtins\nbuiltins.exec = builtins.compile = lambda *_: None",
            "import builtins\nabs = sorted = set = len = lambda *_: {3}\nclass math:\n"
            "    isclose = lambda *_: True\ndef add(a, b): return 9",
            "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'[false, 3]\\n\\1' * 9)\n"
            "    except OSError: pass\nos._exit(0)",
            "class add(int):\n    def __new__(cls, *_): return int.__new__(cls, 9)\n"
            "    def __eq__(self, other): return True\n    __hash__ = int.__hash__",
        ],
    ),
)
def test_no_object_of_the_code_takes_part_in_a_comparison(test, code):
    assert verdict(fenced(code), [test]).reward == 0


def test_tests_use_classes_generators_and_errors():
    code = """
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __str__(self): return f"Stack{tuple(self.items)}"
def squares(n):
    for i in range(n): yield i * i
def shapes(): return (1, 2), {"a": {3}}, b"x", None, float("inf"), frozenset([4]), {(1, 2): [True]}
LIMIT = 5
"""
    tests = [
        "s = Stack([1])\ns.push(2)\nassert len(s) == 2 and s.pop() == 2 and s.items == [1]",
        "assert str(Stack([7, 8])) == 'Stack(7, 8)'",
        "import pytest\nwith pytest.raises(IndexError, match='empty'):\n    Stack().pop()",
        "assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5 and LIMIT == 5",
        "assert shapes() == ((1, 2), {'a': {3}}, b'x', None, math.inf, frozenset([4]), {(1, 2): [True]})",
    ]
    for test in tests:
        assert verdict(fenced(code), [test]).reward == 1, test


@pytest.mark.parametrize(
    "code",
    [
        "class All:\n    def __eq__(self, other): return True\ndef add(a, b): return All()",
        "def add(a, b): return 10**400",  # too large to be compared as a float
    ],
)
def test_values_that_no_comparison_can_take_are_wrong(code):
    label = {"inputs": ["1\n2"], "outputs": ["3.5"], "fn_name": "add"}
    assert verdict(fenced(code), label).reward == 0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (fenced("x = 1"), "x = 1\n"),
        (fenced("a") + fenced("b", "py"), "b\n"),
        (fenced("a") + fenced("ls", "bash"), "a\n"),
        (fenced("a", ""), "a\n"),
        ("```python\ncut short", "cut short"),
        ("<think>" + fenced("a") + "</think>x = 2", "x = 2"),
        (fenced("ls", "bash"), None),
        ("x = 1", "x = 1"),
    ],
)
def test_which_code_is_the_answer(text, program):
    assert last_program(text) == program


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1 2\n3\n", "1  2 \r\n\r\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("0.3333333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("yes", "YES", False),
        ("", "", True),
        ("", "1", False),
        ("nan", "0.5", False),
    ],
)
def test_same_output(given, expected, same):
    assert same_output(given, expected) == same


def test_same_value():
    assert same_value([1, {"a": 0.1 + 0.2}], [1, {"a": 0.3}])
    assert (
        not same_value([1], [1, 2])
        and not same_value({"a": 1}, {"b": 1})
        and not same_value("1", 1)
    )
    assert not same_value(float("nan"), 1.0) and not same_value(None, 0.0)


@pytest.mark.parametrize(
    "label",
    [
        None, 5, "", "no json", '"text"', [], {}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, {"inputs": ["1"]},
        {"inputs": [1], "outputs": ["1"]}, [5], [{"input": "1"}], {"assert_case": None}, "[" * 100_000,
        [{"input": "1", "output": "1", "testtype": "functional"}], {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"},
    ],
)  # fmt: skip
def test_a_label_without_tests_is_said(label):
    for response in ("", fenced(ADD)):
        with pytest.raises(BadRow, match=r"the label (holds no tests|is not JSON)"):
            verdict(response, label)


@pytest.mark.parametrize("response", ["x" * 200_000, "", "```python\n\n```"])
def test_nothing_and_too_much_are_no_programs(response):
    found = verdict(response, ["assert True"])
    assert (found.reward, found.parts) == (0, {"passed_share": 0, "has_code": 0})
