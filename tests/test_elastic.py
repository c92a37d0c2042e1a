"""Nodes that come and go: a run goes on with the ranks that are there, with the losses of one device."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from tests.support.launch import losses, wait_until
from tests.support.programs import finish, run, start_ranks
from tests.support.refusals import refusal
from tests.support.workers import free_port
from utils import connection, launch
from utils.config import load_config
from utils.connection import agree_on_start
from utils.errors import NotEnoughRanksError
from utils.launch import Launch


@pytest.mark.parametrize(
    ("world_size", "settings", "ranks", "count"),
    [
        (4, {}, 4, 1),
        (3, {}, 2, 2),  # one waits, and a rank has as many samples as two had
        (2, {}, 2, 2),
        (1, {}, 1, 4),
        (5, {}, 4, 1),
        (8, {}, 8, 1),
        (3, {"gradient_accumulation": 2, "micro_batch_size": 1}, 2, 4),
        (7, {"micro_batch_size": 1}, 4, 2),
    ],
)
def test_as_many_ranks_train_as_share_the_batch_and_micro_batches_stay_small(
    tiny_options, world_size, settings, ranks, count
):
    words = tiny_options(global_batch_size=8, elastic=True, **{"micro_batch_size": 2, **settings})
    config = load_config(words, world_size=world_size)
    assert launch.fitting_ranks(config, world_size) == ranks
    assert config.gradient_accumulation == count
    assert config.global_batch_size // (ranks * count) <= config.micro_batch_size


def test_what_the_model_is_split_over_stays(tiny_options):
    words = tiny_options(global_batch_size=8, elastic=True, tensor_parallel=2, micro_batch_size=4)
    config = load_config(words, world_size=7, splits=("tensor_parallel",))
    assert launch.fitting_ranks(config, 7) == 4 and config.layout(4).dp == 2
    with pytest.raises(NotEnoughRanksError, match="1 ranks are there, and the model is split over 2: repeat"):
        load_config(words, world_size=1, splits=("tensor_parallel",))


def test_options_that_fix_the_ranks_are_refused(tiny_options):
    with refusal("give global_batch_size, not local_batch_size"):
        load_config(tiny_options(elastic=True, global_batch_size=None, local_batch_size=2), world_size=2)
    with refusal("give a run_num, not auto"):
        load_config(tiny_options(elastic=True, run_num="auto"))
    with refusal("micro_batch_size belongs to elastic"):
        load_config(tiny_options(micro_batch_size=2))


def test_a_run_that_lost_a_rank_goes_on_with_the_losses_of_one_device(tiny_options, tmp_path):
    often = {"global_batch_size": 8, "num_iters": 8, "warmup": 0, "checkpoint_every": 4, "elastic": True}
    words = ["train.py", *tiny_options(**often)]
    assert run(["train.py", *tiny_options(**often, run_num="one")]).returncode == 0
    ended = [finish(rank) for rank in start_ranks([*words, "--run_num=lost"], ranks=4)]
    assert [status for status, _ in ended] == [0] * 4
    # As if the process had been killed behind the checkpoint of iteration 4.
    folder = tmp_path / "logs/quick/lost"
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints/iter-00000008")
    ended = [finish(rank) for rank in start_ranks([*words, "--run_num=lost"], ranks=3)]
    assert [status for status, _ in ended] == [0] * 3
    said = "".join(text for _, text in ended)
    assert said.count("2 of 3 ranks share the batch, 1 wait") == 1 and "Resuming at iteration 4" in said
    assert losses(tmp_path, "lost") == pytest.approx(losses(tmp_path, "one"), rel=1e-5)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["world_size"] == 2


def test_ranks_that_wait_end_with_the_others(tiny_options):
    words = ["train.py", *tiny_options(global_batch_size=2, elastic=True, train_data_path="nowhere")]
    ended = [finish(rank) for rank in start_ranks(words, ranks=3)]
    assert [status for status, _ in ended] == [2] * 3
    assert sum(text.count("nowhere: no such data folder") for _, text in ended) == 1


def test_no_rank_begins_before_those_that_wait_have_come(monkeypatch):
    """A rank that came when the others had ended looked for their store until --comm_timeout was over."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(connection, "open_store", lambda *_: store.clone())
    monkeypatch.setattr(connection, "_watched", None)
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    first = threading.Thread(target=connection.connect, kwargs={"device_name": "cpu", "ranks": 1})
    first.start()
    first.join(0.5)
    assert first.is_alive()
    store.set("rank 1", "")
    first.join(10)
    assert not first.is_alive()


def test_ranks_of_a_new_start_do_not_meet_those_of_before():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = agree_on_start(store, Launch(0, 0, 1), 10)
    assert agree_on_start(store, Launch(0, 0, 1), 10) != before
    with pytest.raises(TimeoutError, match="rank 1 did not come"):
        agree_on_start(store, Launch(0, 0, 2), 0.3)
    with pytest.raises(TimeoutError):  # the offer of before is no start of this rank
        agree_on_start(store, Launch(1, 0, 2), 0.3)


def test_the_range_of_nodes_is_read_from_torchrun(monkeypatch):
    assert not launch.is_range_of_nodes()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert not launch.is_range_of_nodes()
    monkeypatch.setenv("PET_NNODES", "3:3")
    assert not launch.is_range_of_nodes()
    monkeypatch.setenv("PET_NNODES", "2:4")
    assert launch.is_range_of_nodes()


@pytest.mark.slow("agents of torchrun, of which one is killed and another comes")
@pytest.mark.nightly
def test_agents_that_come_and_go_leave_the_losses_of_one_device(tiny_options, tmp_path):
    often = {"global_batch_size": 8, "num_iters": 1500, "warmup": 2, "checkpoint_every": 25, "validate_every": 1000}
    options = tiny_options(**often, run_num="agents")
    assert run(["train.py", *tiny_options(**often, run_num="one")]).returncode == 0
    port = free_port()
    # A node that comes later must learn where the ranks meet, which torch tells in this mode alone.
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def agent():
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc_per_node=1", "--rdzv_backend=c10d",
            f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=elastic", "--max_restarts=9", "--rdzv_conf",
            "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3", "train.py", *options,
        ]  # fmt: skip
        with open(tmp_path / "agents.log", "a") as said:
            return subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)

    log = tmp_path / "logs/quick/agents/out.log"

    def began_on(ranks, times):
        words = f"on {ranks} x cpu"
        return lambda: log.exists() and log.read_text().count(words) >= times

    agents = [agent()]
    time.sleep(1)
    agents += [agent(), agent()]
    try:
        wait_until(began_on(2, 1), 120)  # two of the three share the batch
        wait_until(lambda: list(log.parent.glob("checkpoints/iter-*")))
        lost = agents.pop(1)
        os.killpg(lost.pid, signal.SIGKILL)
        lost.wait()
        wait_until(began_on(2, 2), 60)
        agents.append(agent())
        wait_until(began_on(2, 3), 60)
        for each in agents:
            assert each.wait(200) == 0
    finally:
        for each in agents:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
    assert losses(tmp_path, "agents") == pytest.approx(losses(tmp_path, "one"), rel=1e-4)
