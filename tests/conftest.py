"""Lets a run of the tests end in time: those that have not begun at the moment OPENRL_TESTS_UNTIL, in seconds
since 1970, are skipped with that reason."""

import os
import time

import pytest


@pytest.hookimpl(tryfirst=True)  # before any fixture starts
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get("OPENRL_TESTS_UNTIL", "inf")):
        pytest.skip("not run: the time of OPENRL_TESTS_UNTIL is over")
