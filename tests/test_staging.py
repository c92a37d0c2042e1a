"""Copies of the data on the node's own disk: the same runs, only what a node reads, and nothing is left."""

import fcntl
import os
import shutil
import signal
import socket
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import h5py
import numpy as np
import pytest

from docs.examples import zarr_years
from tests.support import programs
from tests.support.launch import summary
from tests.test_data_loader import CPU
from tests.test_data_loader_dali import assert_same_batches, needs_dali
from training.tasks import build_task
from utils import comm, staging
from utils.errors import STOPPED_STATUS, UsageError
from weather.dataset import FieldDataset

SHARD = ["train_shard.py", "--yaml_config=config/ViT.yaml", "--domain_parallel=1x2"]


@pytest.fixture(scope="module")
def store_folder(sample_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    zarr_years.main([str(sample_folder), str(folder), "--compressed"])
    return folder


@pytest.fixture
def disk(tmp_path):
    """The folder of the node; a test leaves nothing in it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    assert not list(folder.iterdir())


def data_in(folder):
    return {"train_data_path": folder / "train", "valid_data_path": folder / "valid"}


def test_runs_on_copies_have_the_losses_of_the_data_bit_for_bit(tiny_options, tmp_path, disk, store_folder):
    common = {"num_data_workers": 1, "forcings": ["orography", "hour"]}
    for name, own in {
        "plain": {},
        "copied": {"stage_to": "$NODE"},
        "stores": {"stage_to": "$NODE", **data_in(store_folder)},
    }.items():
        env = os.environ | {"NODE": str(disk)}
        alone = programs.start(["train.py", *tiny_options(run_num=f"one {name}", **common, **own)], env, merged=True)
        assert alone.wait() == 0, alone.said()
        for status, output in programs.run_ranks(
            [*SHARD, *tiny_options(run_num=f"two {name}", **common, **own)], NODE=disk
        ):
            assert status == 0, output
        for layout in ("one", "two"):
            expected, found = summary(tmp_path, f"{layout} plain"), summary(tmp_path, f"{layout} {name}")
            assert all(found[key] == expected[key] for key in ("train_loss", "val_loss", "rmse", "acc")), (layout, name)
    assert "staging 1979.zarr: 100%" in alone.said() and "20/20" in alone.said()


def windows_of_two_nodes(sample_folder, disk, hosts):
    """What each of four ranks, of two images in two tiles each, finds in its copies."""
    window = {"columns": slice(0, 12)} if comm.rank() % 2 == 0 else {"columns": slice(12, 32)}
    data, whole = (FieldDataset(sample_folder / "train", 20, (16, 32), **window) for _ in range(2))
    with patch.object(socket, "gethostname", lambda: hosts[comm.rank()]):
        staging.stage([data], Path(disk) / hosts[comm.rank()], reads=True)
    samples = [np.empty(whole.shape, np.float32) for _ in range(2)]
    for index in range(len(whole)):
        for dataset, sample in zip((data, whole), samples, strict=True):
            dataset.read(index, sample)
        np.testing.assert_array_equal(*samples)
        with data.mapped(index, 2) as frames:
            np.testing.assert_array_equal(np.concatenate(frames), samples[1])
    return data.files[0].shape[3], data.mappable


@pytest.mark.parametrize(("hosts", "widths"), [("aabb", [32] * 4), ("abab", [12, 20, 12, 20])])
def test_a_node_copies_the_windows_of_its_ranks_and_no_more(ranks, sample_folder, tmp_path, hosts, widths):
    for name in set(hosts):
        (tmp_path / name).mkdir()
    assert ranks(4, windows_of_two_nodes, sample_folder, str(tmp_path), hosts) == [(width, True) for width in widths]
    assert not [path for name in hosts for path in (tmp_path / name).iterdir()]


def test_years_beyond_the_limit_of_samples_are_not_copied(sample_folder, disk):
    data = FieldDataset(sample_folder / "train", 20, (16, 32), limit=19)
    staging.stage([data], disk, reads=True)
    assert [str(file.location).startswith("/proc") for file in data.files] == [True, False]


@needs_dali
@pytest.mark.timeout(100)
def test_the_processes_of_dali_read_copies_whose_names_are_gone(sample_folder, disk, tiny_config):
    kinds = {"data_loader_config": "dali", "num_data_workers": 1, "stage_to": str(disk)}, {}
    loaders = [build_task(tiny_config(**kind)).loaders(CPU)[0] for kind in kinds]
    assert not list(disk.iterdir())
    with closing(loaders[0]), closing(loaders[1]):
        assert_same_batches(*(loader.train(seed=1, start=2, stop=6) for loader in loaders))


def staged(sample_folder, disk):
    staging.stage([FieldDataset(sample_folder / "train", 20, (16, 32))], disk, reads=True)


def test_a_disk_without_room_a_folder_that_is_not_there_and_a_full_disk_are_one_line(sample_folder, disk, monkeypatch):
    with (
        monkeypatch.context() as changed,
        pytest.raises(UsageError, match=r"disk: 0.002 GB are needed, and 0.001 GB are free"),
    ):
        changed.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 10**6))
        staged(sample_folder, disk)
    with pytest.raises(UsageError, match="stage_to .*/nowhere: .*No such file"):
        staged(sample_folder, disk / "nowhere")
    with monkeypatch.context() as changed, pytest.raises(UsageError, match="stage_to .*: .*No space left on device"):
        changed.setattr(h5py.Dataset, "write_direct", full)
        staged(sample_folder, disk)


def full(*_arguments, **_options):
    raise OSError(28, "No space left on device")


def test_a_copy_that_is_not_what_was_read_is_refused(sample_folder, disk, monkeypatch):
    write, count = h5py.Dataset.write_direct, 0

    def flip_a_bit(self, frame, **options):
        nonlocal count
        count += 1
        if count == 7:
            frame = frame.copy()
            frame.view(np.uint32)[0, 3, 2, 1] ^= 1
        write(self, frame, **options)

    monkeypatch.setattr(h5py.Dataset, "write_direct", flip_a_bit)
    with pytest.raises(UsageError, match=r"0.h5: differs from .*1979.h5 when it is read again"):
        staged(sample_folder, disk)


def test_a_signal_while_copying_leaves_nothing_and_asks_to_be_run_again(sample_folder, disk, monkeypatch):
    write = h5py.Dataset.write_direct

    def signalled(self, frame, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        write(self, frame, **options)

    monkeypatch.setattr(h5py.Dataset, "write_direct", signalled)
    with pytest.raises(SystemExit) as end:
        staged(sample_folder, disk)
    assert end.value.code == STOPPED_STATUS


KILLED = """
import sys, time, h5py
from pathlib import Path
from unittest.mock import patch
from utils import staging
from weather.dataset import FieldDataset
h5py.Dataset.write_direct = lambda *_, **__: time.sleep(100)
staging.stage([FieldDataset(sys.argv[1], 20, (16, 32))], Path(sys.argv[2]), True)
"""


def test_a_killed_job_leaves_a_part_that_the_next_removes_unless_it_is_another_job_at_work(
    sample_folder, disk, tmp_path
):
    (tmp_path / "killed.py").write_text(KILLED)
    jobs = [programs.start([tmp_path / "killed.py", sample_folder / "train", disk]) for _ in range(2)]
    while len(list(disk.glob("staged-*/0.h5"))) < 2:  # two jobs on one node do not meet
        assert all(job.poll() is None for job in jobs), [job.said(job.errors) for job in jobs]
        time.sleep(0.02)
    jobs[0].kill()
    jobs[0].wait()
    staged(sample_folder, disk)
    (left,) = disk.iterdir()  # of the job that still works
    jobs[1].kill()
    jobs[1].wait()
    assert (left / "0.h5").exists()
    staged(sample_folder, disk)


def test_other_folders_are_left_alone(sample_folder, disk):
    (disk / "mine").mkdir()
    (disk / "staged-locked").mkdir()
    descriptor = os.open(disk / "staged-locked", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    staged(sample_folder, disk)
    assert sorted(path.name for path in disk.iterdir()) == ["mine", "staged-locked"]
    os.close(descriptor)
    shutil.rmtree(disk / "mine")
    staged(sample_folder, disk)
