"""Marks of single cases."""

from collections.abc import Iterable
from typing import Any

import pytest


def full_after(first: int, cases: Iterable[Any]) -> list[Any]:
    """Return cases of a parametrised test, of which all after the ``first`` ones run only in ``make
    test_all``."""
    cases = list(cases)
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[first:]]
    return [*cases[:first], *(pytest.param(*case, marks=pytest.mark.full) for case in rest)]
