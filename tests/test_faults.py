"""A short round of faults; `make faults` runs more."""

import os

import pytest

from tests.faults import FAULTS, MOUNTING, by_fork, can_mount, inject, prepare
from tests.faults_in_phases import PHASES, stop_in
from tests.support.marks import slow_but


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("faults"), by_fork)


@pytest.mark.slow("runs that are broken; test_checkpoint.py and test_stop_signals.py show it quickly")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_run_ends_like_an_undisturbed_one(fault, prepared, tmp_path):
    if fault in MOUNTING and not can_mount():
        assert "CI" not in os.environ or os.geteuid() != 0
        pytest.skip("needs the right to mount a file system")
    data, undisturbed = prepared
    row = inject(fault, data, tmp_path / "run", undisturbed, by_fork)
    assert row["resumed"] and row["losses equal"], row


@pytest.mark.parametrize("phase", slow_but(["conversion"], PHASES, "the other phases"))
def test_a_signal_in_a_long_phase_ends_it_with_a_line_and_loses_nothing(phase, data_keys, tmp_path):
    stop_in(phase, data_keys, tmp_path / "run")
