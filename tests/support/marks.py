"""Marks that several tests need."""

import pytest
import torch

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])  # the version that is installed


def slow_but(quick, cases, reason):
    """Cases for parametrize, of which all are slow but those in `quick`; reason: what only the slow ones show."""
    cases = list(cases)
    assert set(quick) < set(cases), "a quick case is none of the cases"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow(reason)) for case in cases]
