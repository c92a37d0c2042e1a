"""Marks that several tests need."""

import pytest
import torch

from utils.torch_private import VERSION


def slow_but(quick, cases, reason, nightly=False):
    """Cases for parametrize, of which all are slow but those in `quick`.

    reason: what only the slow ones show. nightly: continuous integration leaves them to each night.
    """
    cases = list(cases)
    assert all(case in cases for case in quick) and len(quick) < len(cases), "a quick case is none of the cases"
    marks = _marks(reason, nightly)
    return [case if case in quick else pytest.param(case, marks=marks) for case in cases]


def slow_rows_but(quick, rows, reason, nightly=False):
    """The same for rows of several arguments. quick: numbers of the quick rows."""
    rows = list(rows)
    assert max(quick) < len(rows) and len(quick) < len(rows), "a quick row is none of the rows"
    marks = _marks(reason, nightly)
    return [row if number in quick else pytest.param(*row, marks=marks) for number, row in enumerate(rows)]


def _marks(reason, nightly):
    slow = pytest.mark.slow(reason)
    return [slow, pytest.mark.nightly] if nightly else [slow]


def needs_torch(least, reason):
    """Skips a test with a torch older than `least`, (2, 13). reason: what that torch lacks."""
    return pytest.mark.skipif(least > VERSION, reason=f"torch {torch.__version__} {reason}")
