"""How the tests are collected and run.

Those that have not begun at the moment OPENRL_TESTS_UNTIL, in seconds since 1970, are skipped with
that reason. A test imports libraries that take a second where it needs them, since each process
that runs tests imports every file of tests."""

import os
import time

import pytest

from openrl.lazy import loading


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    with loading():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before any fixture starts
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get("OPENRL_TESTS_UNTIL", "inf")):
        pytest.skip("not run: the time of OPENRL_TESTS_UNTIL is over")
