"""Tests programs: the response's code runs in ``sandbox``, with a new process for each case."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from openrl.extension_points import verifiers
from openrl.flags.schema import flag
from openrl.rewards.verifiers.base import Answer, label_data
from openrl.rewards.verifiers.extract import after_thinking
from openrl.rewards.verifiers.program_cases import Case, read_cases
from openrl.rewards.verifiers.sandbox import RunLimits, RunResult, run
from openrl.types import Score

LONGEST = 100_000  # characters of code
TOLERANCE = 1e-6  # relative and absolute, for floating-point numbers
_LANGUAGE = re.compile(r"[ \t]*(?:python3?|py)?[ \t]*\r?\n", re.IGNORECASE)


@dataclass(frozen=True)
class CaseResult:
    outcome: Literal["passed", "wrong", "error", "timeout", "memory", "output", "skipped"]
    contained: bool = True


@dataclass(frozen=True)
class CodeOptions:
    partial: bool = flag(False, "The reward is the share of cases that pass; off: 1 if all do.")
    timeout: float = flag(10.0, "Seconds for one case.", bounds="> 0")
    total_timeout: float = flag(
        60.0, "Seconds for all cases; what is left over has failed.", bounds="> 0"
    )
    memory_mb: int = flag(1024, "Address space of one case.", bounds=">= 64")
    output_kb: int = flag(1024, "What one case may print.", bounds="> 0")
    max_cases: int = flag(0, "Only the first so many cases run; 0 = all.", bounds=">= 0")


@verifiers.register("code", options=CodeOptions)
def code(answer: Answer, options: CodeOptions) -> Score:
    """The last block of Python code passes its tests. Its run is contained, but not secure.

    Label: the cases, as they are or as JSON text: {"inputs": [..], "outputs": [..]} with "fn_name"
    for calls (APPS, TACO, verl's prime_code); a list of {"input": .., "output": ..}, with
    "testtype": "functional" for calls (LiveCodeBench); a list of asserts (MBPP); {"assert_case":
    [..]}; a list of {"assert_code": ..} (ROLL, KodCode).
    Reward: [0, 1]
    Parts: passed_share, has_code, error_share, timeout_share, contained
    """
    cases = read_cases(label_data(answer), answer.meta)[: options.max_cases or None]
    program = last_program(answer.text)
    if program is None or not program.strip() or len(program) > LONGEST:
        return Score.of(False, passed_share=0.0, has_code=0.0)
    results = list(run_cases(program, cases, options))
    count = Counter(result.outcome for result in results)
    share, good = count["passed"] / len(results), count["passed"] == len(results)
    parts = {
        "passed_share": share,
        "has_code": 1.0,
        "error_share": count["error"] / len(results),
        "timeout_share": (count["timeout"] + count["skipped"]) / len(results),
        "contained": float(all(r.contained for r in results)),
    }
    return Score(share if options.partial else float(good), float(good), parts)


def last_program(text: str) -> str | None:
    """Return the last fenced block that is Python or names no language, closed or not; all of the
    text if it has no fences; None if every block is in another language."""
    text = after_thinking(text)
    pieces = text.split("```")
    if len(pieces) == 1:
        return text
    for piece in reversed(pieces[1::2]):
        language = _LANGUAGE.match(piece)
        if language:
            return piece[language.end() :]
    return None


def run_cases(program: str, cases: list[Case], options: CodeOptions) -> Iterator[CaseResult]:
    """Yield one result per case, in their order."""
    end = time.monotonic() + options.total_timeout
    for case in cases:
        left = end - time.monotonic()
        if left <= 0:
            yield CaseResult("skipped")
            continue
        limits = RunLimits(
            min(options.timeout, left), options.memory_mb << 20, options.output_kb << 10
        )
        yield _run_case(program, case, limits)


def _run_case(program: str, case: Case, limits: RunLimits) -> CaseResult:
    if case.mode == "asserts":
        module = {"mode": "serve", "code": program}
        ran = run({"mode": "asserts", "code": case.given}, limits, module=module)
    elif case.mode == "call":
        call = {"mode": "call", "function": case.function, "arguments": case.given}
        ran = run(call | {"code": program}, limits)
    else:
        ran = run({"mode": "program", "code": program}, limits, stdin=case.given)
    if ran.outcome != "done":
        return CaseResult(ran.outcome, ran.contained)
    right = case.mode == "asserts" or _right(case, ran)
    return CaseResult("passed" if right else "wrong", ran.contained)


def _right(case: Case, ran: RunResult) -> bool:
    if case.mode == "program":
        return same_output(ran.stdout.decode(errors="replace"), case.expected)
    try:
        value = json.loads(ran.result)
        wrapped = isinstance(case.expected, list) and len(case.expected) == 1  # as APPS does
        return same_value(value, case.expected) or (wrapped and same_value(value, case.expected[0]))
    except (ValueError, RecursionError, OverflowError):  # an integer too large for a float
        return False


def same_output(given: str, expected: str) -> bool:
    """Whether two outputs are equal line by line, apart from empty lines, the amount of whitespace,
    and the last digits of decimals."""
    lines, wanted = (
        [line.split() for line in text.splitlines() if line.strip()] for text in (given, expected)
    )
    return [len(line) for line in lines] == [len(line) for line in wanted] and all(
        a == b or _close(a, b)
        for line, other in zip(lines, wanted, strict=True)
        for a, b in zip(line, other, strict=True)
    )


def _close(given: str, expected: str) -> bool:
    try:
        return "." in expected and math.isclose(
            float(given), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE
        )
    except ValueError:
        return False


def same_value(given: Any, expected: Any) -> bool:
    """Whether two values are equal as JSON, apart from the last digits of floats."""
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(same_value, given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(
            same_value(given[key], expected[key]) for key in given
        )
    if isinstance(given, float) or isinstance(expected, float):
        numbers = isinstance(given, (int, float)) and isinstance(expected, (int, float))
        return numbers and math.isclose(given, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(given == expected)
