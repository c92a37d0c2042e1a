"""One run at a time trains in a folder, and ranks end with what started them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.launch import wait_until
from tests.support.refusals import refusal
from training.run import owner as run_owner
from training.run.folder import next_run_num
from training.run.owner import FILE, Owner, RunOwner, this_process


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Heartbeats in a hurry."""
    monkeypatch.setattr(run_owner, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_owner, "DEAD_SECONDS", 1.0)


def write(folder, beats=0, **changes):
    """An owner's file as another process would write it."""
    owner = this_process().model_copy(update=changes)
    (folder / FILE).write_text(json.dumps({"owner": owner.model_dump(), "beats": f"{beats:012d}"}) + "\n")


def owner_of(folder):
    return Owner.model_validate(json.loads((folder / FILE).read_text())["owner"])


HOLD = """
    import sys, time
    from pathlib import Path
    from training.run.owner import RunOwner
    RunOwner(Path(sys.argv[1]))
    print("mine", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that owns tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_in_use_is_refused_and_its_owner_named(tmp_path, holder):
    with refusal(rf"is in use: process {holder.pid} on .* trains in it; .*--run_num"):
        RunOwner(tmp_path)
    assert owner_of(tmp_path).process == holder.pid


def test_the_folder_of_a_killed_process_is_free(tmp_path, holder):
    holder.kill()
    holder.wait()
    RunOwner(tmp_path).release()
    RunOwner(tmp_path).release()  # also of one that has ended as it should
    assert owner_of(tmp_path).process == os.getpid()


def test_a_stopped_process_still_owns_its_folder(tmp_path, holder):
    holder.send_signal(signal.SIGSTOP)
    with refusal("is in use"):
        RunOwner(tmp_path)


def test_a_number_that_another_process_has_now_is_no_owner(tmp_path):
    write(tmp_path, process=os.getppid(), started="1")
    RunOwner(tmp_path).release()


def test_an_owner_elsewhere_is_alive_while_its_heart_beats(tmp_path, monkeypatch):
    """Also for an array's other task, which is a job of its own."""
    monkeypatch.setattr(run_owner, "DEAD_SECONDS", 100.0)
    write(tmp_path, host="elsewhere", job="7")
    with ThreadPoolExecutor() as pool:
        second = pool.submit(RunOwner, tmp_path)
        for beats in range(1, 30):
            time.sleep(0.02)
            write(tmp_path, beats, host="elsewhere", job="7")
        with refusal("job 7, process .* on elsewhere trains in it"):
            second.result()


@pytest.mark.parametrize("text", [None, "", "[1, 2", "{}"], ids=str)
def test_a_heart_that_has_stopped_leaves_the_folder(tmp_path, text):
    write(tmp_path, host="elsewhere")
    if text is not None:
        (tmp_path / FILE).write_text(text)
    RunOwner(tmp_path).release()


@pytest.mark.parametrize("space", ["elsewhere", None])
def test_a_job_that_comes_back_has_its_folder_at_once(tmp_path, monkeypatch, space):
    """Before the heartbeat could tell; on the same machine too, where it may not have ended yet."""
    monkeypatch.setattr(run_owner, "DEAD_SECONDS", 1000.0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    write(tmp_path, process=os.getppid(), **({"host": space} if space else {}))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    owner = RunOwner(tmp_path)
    assert owner_of(tmp_path).restarts == (1, 0)
    owner.release()


def test_what_torchrun_starts_again_finds_the_folder_of_its_own_run(tmp_path, monkeypatch):
    """Not of a run without a job, or of another torchrun, though all are called 'none'."""
    for number, job in ("00", ""), ("01", "of torchrun 1 (1)"):
        (tmp_path / number).mkdir()
        write(tmp_path / number, job=job)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert next_run_num(tmp_path) == "02"
    RunOwner(tmp_path / "02").release()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert next_run_num(tmp_path) == "02"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert next_run_num(tmp_path) == "03"


def test_of_several_one_takes_a_folder_over(tmp_path):
    write(tmp_path, process=os.getppid(), started="1")
    program = textwrap.dedent(HOLD)
    processes = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    time.sleep(0.1)
    wait_until(lambda: sum(p.poll() is None for p in processes) <= 1, 120)
    left = [p for p in processes if p.poll() is None]
    for process in left:
        process.kill()
    for process in processes:
        process.communicate()
    assert [p.pid for p in left] == [owner_of(tmp_path).process]


def test_who_has_lost_a_folder_ends(tmp_path, holder):
    write(tmp_path, process=1)
    assert holder.wait(60) == 1
    assert owner_of(tmp_path).process == 1


def test_a_file_that_was_tidied_up_comes_back(tmp_path):
    owner = RunOwner(tmp_path)
    (tmp_path / FILE).unlink()
    wait_until(lambda: (tmp_path / FILE).exists() and (tmp_path / FILE).read_text())
    assert isinstance(owner_of(tmp_path), Owner)
    owner.release()
