"""Terminals that go away, and disks that fill, while a run trains on."""

import signal
import subprocess
import sys

import pytest

import train
from tests.support import programs
from tests.support.launch import popen, summary, wait_for
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from training.checkpoints.folder import CheckpointFolder, first_whole


def shell(line, words, **variables):
    """Run train.py with these words by a line of the shell, in which it is `train`."""
    command = subprocess.list2cmdline([sys.executable, "train.py", *words])
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; train() {{ {command}; }}; {line}"],
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("train > /dev/full", marks=pytest.mark.slow("an output that cannot be written")),
        pytest.param("train >&-", marks=pytest.mark.slow("a terminal that was closed")),
        pytest.param("train | head -1", marks=pytest.mark.slow("a pipe that was closed")),
        pytest.param("train 2>&-", marks=pytest.mark.slow("no standard error")),
        pytest.param("train > /dev/full 2>&1", marks=pytest.mark.slow("neither can be written")),
    ],
)
def test_a_run_goes_on_where_its_output_cannot(tiny_options, tmp_path, line):
    done = shell(line, tiny_options(num_iters=20, warmup=0))
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert summary(tmp_path, "00")["iterations"] == 20
    assert "Saved checkpoint" in (tmp_path / "logs/quick/00/out.log").read_text()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_had_enough_ends_a_program_in_silence(unbuffered):
    lines = "for _ in range(10**5): print('a line')"
    program = f"from utils.errors import run_main\ndef main():\n    {lines}\nrun_main(main)"
    command = subprocess.list2cmdline([sys.executable, "-c", program])
    line = f"set -o pipefail; PYTHONUNBUFFERED={unbuffered} {command} | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (141, "a line\n", "")


@pytest.mark.parametrize("ignored", slow_but([False], [False, True], "nohup itself"))
def test_a_lost_connection_stops_a_run_as_a_warning_does_but_not_under_nohup(tiny_options, tmp_path, ignored):
    words = ["train.py", *tiny_options(num_iters=300 if ignored else 100_000, checkpoint_every=100_000)]
    run = popen(["nohup", sys.executable, *words]) if ignored else programs.start(words)
    wait_for(tmp_path / "logs/quick/00/out.log", "Starting training", run)
    run.send_signal(signal.SIGHUP)
    assert run.wait() == (0 if ignored else 75)
    assert first_whole(CheckpointFolder(tmp_path / "logs/quick/00/checkpoints", keep=1).folders()) is not None


@pytest.mark.parametrize("run_num", ["../..", "/tmp/elsewhere", "a/b", ".", "..", ""])
def test_a_run_stays_in_its_folder(tiny_options, tmp_path, run_num):
    with refusal("run_num: "):
        train.main(tiny_options(run_num=run_num))
    assert not (tmp_path / "logs").exists()
