"""Several ranks of this machine: the serial result, and an end whatever happens to one of them."""

import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from functools import cache

import h5py
import psutil
import pytest
from torch.distributed import HashStore

from tests.conftest import words_of
from tests.support.launch import losses, rank_pids, summary, torchrun, wait_for
from tests.support.marks import slow_but
from tests.support.programs import finish, run_ranks, start_ranks
from tests.support.workers import free_port
from utils import connection, rank_failure
from utils.errors import UsageError
from utils.launch import Launch
from utils.signals import StopRequest

COMMON = {"num_iters": 80, "checkpoint_every": 20, "validate_every": 4, "num_data_workers": 1}


@pytest.fixture(scope="module")
def shared(tiny_settings, tmp_path_factory):
    """Call with a number of ranks: the losses of a run of the whole, made once."""
    folder = tmp_path_factory.mktemp("whole")
    words = words_of(tiny_settings | {"expdir": folder / "logs"} | COMMON)

    @cache
    def trained(ranks):
        for status, output in run_ranks(["train.py", f"--run_num={ranks}", *words], ranks):
            assert status == 0, output
        assert summary(folder, str(ranks))["world_size"] == ranks
        return losses(folder, str(ranks))

    return trained


def train_on_two(words, script="train.py"):
    """Start two ranks of a script."""
    return start_ranks([script, "--yaml_config=config/ViT.yaml", *words])


def finish_all(processes):
    """Exit statuses of the ranks, and all that they said."""
    ended = [finish(process) for process in processes]
    return [status for status, _ in ended], "".join(output for _, output in ended)


def test_two_ranks_train_like_one(shared):
    assert shared(2) == pytest.approx(shared(1), rel=1e-4)


@pytest.mark.slow("torchrun itself, which starts ranks again where one was killed")
def test_a_killed_rank_is_restarted(tiny_options, tmp_path, shared):
    process = torchrun(tiny_options(run_num="auto", **COMMON), restarts=2)
    wait_for(tmp_path / "logs/quick/00/out.log", "Saved checkpoint iter-00000020", process)
    time.sleep(random.uniform(0, 0.5))
    os.kill(random.choice(rank_pids(process)), signal.SIGKILL)
    status, output = finish(process)
    assert status == 0, output
    assert "Resuming at iteration" in output
    assert losses(tmp_path, "00") == shared(2)


def test_ranks_agree_on_the_step_at_which_they_stop(tiny_options, tmp_path, shared):
    parts = train_on_two(tiny_options(run_num="parts", **COMMON))
    wait_for(tmp_path / "logs/quick/parts/out.log", "Starting training", parts[0])
    time.sleep(random.uniform(0, 0.5))
    parts[1].send_signal(signal.SIGUSR1)  # one rank only
    statuses, output = finish_all(parts)
    assert statuses == [75, 75], output
    statuses, output = finish_all(train_on_two(tiny_options(run_num="parts", **COMMON)))
    assert statuses == [0, 0] and "Resuming at iteration" in output, output
    assert losses(tmp_path, "parts") == shared(2)


# Found before the ranks are connected, and after.
COMMON_ERRORS = [
    ({"config": "qick"}, "no config 'qick' (did you mean 'quick'?)"),
    ({"train_data_path": "nowhere/train"}, "nowhere/train: no such data folder"),
]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param(*COMMON_ERRORS[0], marks=pytest.mark.slow("the same before the ranks are connected")),
        pytest.param(*COMMON_ERRORS[1], marks=pytest.mark.slow("torchrun's own summary")),
    ],
    ids=["settings", "data"],
)
def test_an_error_of_all_ranks_is_one_line_and_in_the_summary_of_torchrun(tiny_options, wrong, words):
    status, output = finish(torchrun(tiny_options(global_batch_size=3, **wrong), ranks=3))
    said, of_torch = output.split("train.py FAILED")
    assert status == 1
    assert [line for line in said.splitlines() if words in line] == [find_error(said)], output
    assert find_error(said).startswith("error: rank 0: ")
    assert "Traceback" not in said.split("error: rank 0")[0], output
    assert of_torch.count(f"traceback : {find_error(said).removeprefix('error: ')}") == 3, output
    assert "exitcode  : 2 " in of_torch, output  # of the slowest ranks -15 at worst: torchrun ends them


def find_error(output):
    """The only line of an output that is an error."""
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(("wrong", "words"), COMMON_ERRORS, ids=["settings", "data"])
def test_an_error_of_all_ranks_is_said_once_without_a_launcher(tiny_options, wrong, words):
    statuses, output = finish_all(start_ranks(["train.py", *tiny_options(**wrong)], ranks=4))
    assert statuses == [2] * 4
    assert output.count("\n") == 1 and output.startswith("error: rank 0: ") and words in output


@pytest.mark.parametrize("failing", slow_but([2], [0, 2], "rank 0, which holds the store"))
def test_settings_that_only_one_rank_cannot_read_end_all_and_name_the_rank(tiny_options, failing):
    def words(rank):
        return ["train.py", *tiny_options(config="qick" if rank == failing else "quick", global_batch_size=3)]

    began = time.monotonic()
    statuses, output = finish_all(start_ranks(words, ranks=3))
    assert statuses == [2] * 3 and time.monotonic() - began < 60  # not --comm_timeout
    assert output.count("\n") == 1 and output.startswith(f"error: rank {failing}: config/ViT.yaml: no config 'qick'")


def test_rank_0_stays_until_no_other_rank_looks_into_its_store(monkeypatch):
    """torch prints a stack of C++ on a rank that looks into a store that is gone."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = HashStore()
    first, second = (rank_failure.FailureListener(store, rank, 2) for rank in range(2))
    ending = threading.Thread(target=first._wait_for_others, daemon=True)
    ending.start()
    store.add(rank_failure.KNOWN, 1)  # the second rank knows that all shall end, and is slow to look again
    assert rank_failure.wait_until(lambda: store.check([rank_failure.END]), 10)
    ending.join(0.5)
    assert ending.is_alive()
    second._wait_for_others()
    ending.join(10)
    assert not ending.is_alive()
    for listener in (first, second):
        listener.stop(10)


def test_a_rank_that_ends_is_not_stopped_once_more(monkeypatch, capfd):
    """torchrun stops all ranks when the first of them has ended: an error was then said twice."""

    def leave(status):
        raise SystemExit(status)

    def stop_while_it_waits():
        rank_failure.wait_until(lambda: store.check([rank_failure.KNOWN]), 10)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        store.set(rank_failure.END, "")

    monkeypatch.setattr(rank_failure, "exit_at_once", leave)
    store = HashStore()
    store.set(rank_failure.FIRST_FAILURE, "2 rank 0: all have this error")
    listener = rank_failure.FailureListener(store, rank=1, world_size=2)
    listener.stop(10)
    torchrun_stops = threading.Thread(target=stop_while_it_waits)
    torchrun_stops.start()
    try:
        with StopRequest(raises=True), pytest.raises(SystemExit) as ended:
            listener.end_this_rank(UsageError("all have this error"))
    except KeyboardInterrupt as stop:
        pytest.fail(str(stop))
    torchrun_stops.join()
    assert ended.value.code == 2 and capfd.readouterr().err == ""


def test_a_rank_that_cannot_tell_the_others_says_what_is_wrong_itself(tiny_options):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (rank,) = start_ranks(["train.py", *tiny_options(config="qick")], only=[0], port=port)
        status, output = finish(rank, timeout=60)
    assert status == 2 and output.count("\n") == 1 and output.startswith("error: rank 0: config/ViT.yaml: no config")


def test_a_stuck_rank_leaves_the_stacks_of_all(tiny_options, tmp_path):
    ranks = train_on_two(tiny_options(num_iters=100_000, watchdog_timeout=4, validate_every=10_000))
    wait_for(tmp_path / "logs/quick/00/out.log", "Time taken for epoch 1 ", ranks[0])
    ranks[1].send_signal(signal.SIGSTOP)
    time.sleep(6)
    ranks[1].send_signal(signal.SIGCONT)
    statuses, output = finish_all(ranks)
    assert 0 not in statuses
    assert "no step finished within 4 s (watchdog_timeout); the stacks of all threads are in" in output
    stacks = (tmp_path / "logs/quick/00/stacks-rank0.txt").read_text()
    # The ranks meet in the backward pass, and in a reading: rank 0 waits in whichever of the two came next.
    waits_in_step = "run_step" in stacks and "backward" in stacks
    assert waits_in_step or "_sum_over_ranks" in stacks, stacks
    assert all((tmp_path / f"logs/quick/00/collectives-rank{rank}.json").exists() for rank in (0, 1))


@pytest.mark.parametrize("failing", slow_but([1], [0, 1], "rank 0, which holds the store"))
def test_a_rank_that_fails_takes_the_others_along_and_its_error_is_named(
    tiny_options, tmp_path, sample_folder, failing
):
    """No launcher ends the others here. The failing rank reads its own copy of the data, which is then cut short."""
    shutil.copytree(sample_folder / "train", tmp_path / "train")
    shutil.copytree(tmp_path / "train", tmp_path / "whole/train")
    common = {"num_iters": 100_000, "comm_timeout": 30, "validate_every": 10_000}
    whole = ["train.py", *tiny_options(train_data_path=tmp_path / "whole/train", **common)]
    cut = ["train.py", *tiny_options(train_data_path=tmp_path / "train", **common)]
    ranks = start_ranks(lambda rank: cut if rank == failing else whole)
    wait_for(tmp_path / "logs/quick/00/out.log", "Time taken for epoch 1 ", ranks[0])
    os.truncate(tmp_path / "train/1980.h5", 100_000)
    ended = [finish(rank, timeout=60) for rank in ranks]
    status, output = ended[failing]
    assert status == 2
    assert f"error: rank {failing}: {tmp_path}/train/1980.h5: " in output and "Traceback" not in output
    status, output = ended[1 - failing]
    assert status != 0
    assert "error" not in output


@pytest.mark.slow("a launch of which a rank never comes")
def test_a_rank_that_never_comes_is_not_waited_for_for_ever(tiny_options, tmp_path):
    (rank,) = start_ranks(["train.py", *tiny_options(comm_timeout=3)], only=[0])
    status, output = finish(rank, timeout=60)
    assert status == 2
    assert "error: rank 0: the 2 ranks could not connect within 3 s through 127.0.0.1:" in output
    assert "rank 1 did not come" in output


@pytest.mark.slow("a torchrun that is killed")
def test_ranks_end_with_the_torchrun_that_started_them(tiny_options, tmp_path):
    """They would train on, and meet whoever starts the run again."""
    agent = torchrun(tiny_options(num_iters=100_000, warmup=1, run_num="orphans"))
    wait_for(tmp_path / "logs/quick/orphans/out.log", "Starting training", agent)
    ranks = [psutil.Process(pid) for pid in rank_pids(agent)]
    assert len(ranks) == 2
    agent.kill()
    _, left = psutil.wait_procs(ranks, timeout=60)
    for process in left:
        process.kill()
    assert not left
    said = agent.communicate()[0]
    assert "ends because torchrun has been killed" in said, said


def test_the_store_of_one_machine_is_not_open_to_others():
    port = free_port()
    store = connection.open_store(Launch(0, 0, 1, 1, "127.0.0.1", port), 10)
    store.set("a", "1")
    listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and not c.raddr]
    assert listening == ["127.0.0.1"]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_value_that_is_no_number_is_named_by_every_rank(tiny_options, tmp_path, sample_folder, split):
    shutil.copytree(sample_folder / split, tmp_path / split)
    path = next((tmp_path / split).glob("*.h5"))
    with h5py.File(path, "r+") as file:
        file["fields"][4, 2] = float("nan")
    options = tiny_options(num_iters=40, **{f"{split}_data_path": tmp_path / split})
    statuses, output = finish_all(start_ranks(["train.py", *options]))
    assert statuses == [2, 2]
    assert f"{path}: frame 4: channel 2 (t2m) holds nan" in output and "Traceback" not in output


@pytest.mark.parametrize("missing", [True, False])
def test_a_file_that_is_another_one_on_some_ranks_is_named(tiny_options, tmp_path, sample_folder, missing):
    shutil.copytree(sample_folder / "train", tmp_path / "train")
    path = tmp_path / "train/1980.h5"
    if missing:
        path.unlink()
    else:
        with h5py.File(path, "r+") as file:
            file["another"] = range(1000)
    words = [["train.py", *tiny_options()], ["train.py", *tiny_options(train_data_path=path.parent)]]
    statuses, output = finish_all(start_ranks(lambda rank: words[rank]))
    assert statuses == [2, 2]
    there, here = "nothing" if missing else r"20 frames, \d+ bytes", r"20 frames, \d+ bytes"
    assert re.search(rf"train/1980.h5: rank 1 on \S+ sees {there}, rank 0 on \S+ {here}", output)
