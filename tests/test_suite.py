"""The tests as people run them, and the programs that they fork instead of starting."""

import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from tests.support import launch, programs
from tests.support.refusals import refusal
from tools.instruments.ranks import Teams
from utils.device import select_device


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["test"], '-n 3 --dist loadfile -m "not slow"'),
        (["test", "FILES=tests/test_vit.py"], '-n 0 --dist loadfile -m "not slow" tests/test_vit.py'),
        (["test", "FILES=a.py b.py"], '-n 3 --dist loadfile -m "not slow" a.py b.py'),
        (["test", "PYTEST_ARGS=-k name", "WORKERS=0"], '-n 0 --dist loadfile -m "not slow" -k name'),
        (["test-all"], "-n 3 --dist loadfile --cov --cov-report=term"),
        (["test-all", "COVERAGE="], "-n 3 --dist loadfile"),
        (["test-all", "FILES=a.py", "PYTEST_ARGS=-x"], "-n 0 --dist loadfile --cov --cov-report=term -x a.py"),
        (["test-all", "FILES=a.py"], "-n 0 --dist loadfile --cov --cov-report=term a.py"),
    ],
)
def test_make_passes_files_and_arguments_on(words, command):
    env = launch.without_make("FILES", "PYTEST_ARGS", "WORKERS", "COVERAGE")
    said = subprocess.run(["make", "-n", *words], capture_output=True, text=True, check=True, env=env).stdout
    assert " ".join(said.splitlines()[-1].split()).endswith(f"python -m pytest {command}")


def test_the_device_auto_fails_in_tests_and_in_the_programs_that_they_start(tiny_config, tiny_options):
    """So no test computes on a GPU by chance; all of them pin `cpu`, which a machine without a GPU shows."""
    if torch.accelerator.is_available():
        pytest.skip("auto is a GPU here")
    with refusal("sees none"):
        select_device("auto")
    with refusal("sees none"):
        Teams(tiny_config(device="auto")).call(1, print)
    assert programs.run(["train.py", *tiny_options(device="auto")]).returncode == 2
    assert launch.popen([sys.executable, "train.py", *tiny_options(device="auto")]).wait() == 2


PROGRAM = """
import atexit, os, signal, sys, threading, time
atexit.register(print, "at exit", flush=True)
print(sys.argv[1:], os.environ["HOME"], os.environ.get("PATH"), os.getcwd(), repr(sys.stdin.read()), __name__)
print(os.getpid() == os.getpgrp(), signal.getsignal(signal.SIGINT) is signal.default_int_handler, file=sys.stderr)
if "wait" in sys.argv:
    print("ready", os.getpid(), flush=True)
    time.sleep(60)
threading.Timer(0.1, lambda: print("thread")).start()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_a_forked_program_is_as_one_that_was_started(program, tmp_path):
    done = programs.run([program, "3", "two words"], {"HOME": "here"}, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout == f"['3', 'two words'] here None {tmp_path} '' __main__\nthread\nat exit\n"
    assert done.stderr == "True True\n"


def test_a_forked_program_is_killed_and_leaves_nobody_behind(program):
    process = programs.start([program, "wait"], merged=True)
    while "ready" not in process.said():
        assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    programs.end_all()
    assert process.wait(10) == -signal.SIGKILL


def test_python_that_forks_is_as_python(program, tmp_path):
    python = programs.write_python(tmp_path / "bin")
    done = subprocess.run([python, "-u", program, "3", "two words"], capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout.startswith("['3', 'two words']") and done.stderr == "True True\n"
    assert subprocess.run([python, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout == "42\n"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = launch.popen([python, program, "wait"])
        ready = next(line for line in process.stdout if line.startswith("ready"))
        forked = psutil.Process(int(ready.split()[1]))
        process.send_signal(number)
        assert process.wait(10) == -number
        psutil.wait_procs([forked], 10)
        assert not forked.is_running()


@pytest.mark.slow("tests that end, and the server of their programs with them")
def test_the_server_of_programs_ends_with_the_tests():
    code = (
        "import psutil; from tests.support import programs; programs.run(['-m', 'this']); "
        "print(*[child.pid for child in psutil.Process().children()])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    servers = [psutil.Process(int(pid)) for pid in said.split() if psutil.pid_exists(int(pid))]
    assert said.strip() and not psutil.wait_procs(servers, 20)[1]


@pytest.mark.slow("two sessions of tests inside of this one")
def test_what_a_session_leaves_in_the_temporary_folder_fails_it(tmp_path):
    (tmp_path / "test_tidy.py").write_text("def test_tidy(tmp_path):\n    (tmp_path / 'kept').touch()\n")
    (tmp_path / "test_litter.py").write_text(
        "import tempfile\n\n\ndef test_litter():\n    tempfile.mkdtemp(prefix='litter-')\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from tests.support import temporary\n\ntemporary.PATIENCE_SECONDS = 0\nfrom tests.conftest import *\n"
    )
    kept = ("VIT_ERA5_TESTS", "TMPDIR", "PYTEST_XDIST_WORKER", "PYTEST_DEBUG_TEMPROOT")
    env = {name: value for name, value in os.environ.items() if name not in kept}
    root = str(pathlib.Path(__file__).parents[1])
    statuses = {}
    for name in ("tidy", "litter"):
        env |= {"TMPDIR": str(tmp_path), "PYTHONPATH": root}
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            f"{tmp_path}/test_{name}.py",
        ]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
        statuses[name] = done.returncode
        assert not list(tmp_path.glob("t-*")), done.stdout
    assert statuses == {"tidy": 0, "litter": 1}
    assert "left in the temporary folder: litter-" in done.stdout
