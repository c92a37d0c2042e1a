"""Marks that several tests need."""

import pytest
import torch

from utils.torch_private import VERSION


def slow_but(quick, cases, reason, nightly=False):
    """Cases for parametrize, of which all are slow but those in `quick`.

    reason: what only the slow ones show. nightly: continuous integration leaves them to each night.
    """
    cases = list(cases)
    assert set(quick) < set(cases), "a quick case is none of the cases"
    marks = [pytest.mark.slow(reason), pytest.mark.nightly] if nightly else [pytest.mark.slow(reason)]
    return [case if case in quick else pytest.param(case, marks=marks) for case in cases]


def needs_torch(least, reason):
    """Skips a test with a torch older than `least`, (2, 13). reason: what that torch lacks."""
    return pytest.mark.skipif(least > VERSION, reason=f"torch {torch.__version__} {reason}")
