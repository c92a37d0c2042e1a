"""Marks that several tests need."""

import pytest
import torch

from utils.torch_private import VERSION


def slow_but(quick, cases, reason):
    """Cases for parametrize, of which all are slow but those in `quick`; reason: what only the slow ones show."""
    cases = list(cases)
    assert set(quick) < set(cases), "a quick case is none of the cases"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow(reason)) for case in cases]


def needs_torch(least, reason):
    """Skips a test with a torch older than `least`, (2, 13). reason: what that torch lacks."""
    return pytest.mark.skipif(least > VERSION, reason=f"torch {torch.__version__} {reason}")
