"""The DALI loader gives what the native one gives, and its processes live and die with the trainer."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from tests.support import programs
from tests.support.launch import alive, wait_until
from tests.support.refusals import refusal
from tests.support.workers import NAME
from tests.test_data_loader import write_years
from training.tasks import build_task
from training.tasks.forecast import loader_class
from weather.checks.statistics import Statistics
from weather.years.dataset import FieldDataset

CPU = torch.device("cpu")
absent = find_spec("nvidia") is None or find_spec("nvidia.dali") is None
needs_dali = pytest.mark.skipif(
    absent and "CI" not in os.environ, reason="DALI is not installed: pip install -r requirements/dali.txt"
)
pytestmark = pytest.mark.timeout(100)


@pytest.fixture
def loaders(tiny_config):
    """Training and validation loader of DALI, or `data_loader_config`, on the sample data; closed after the test."""
    opened = []

    def make(device=CPU, **overrides):
        opened.extend(build_task(tiny_config(**{"data_loader_config": "dali"} | overrides)).build_loaders(device))
        return opened[-2:]

    yield make
    for loader in opened:
        loader.close()


def assert_same_batches(got, expected, atol=1e-5):
    """DALI's batches are read to the end before they are compared, so a buffer used twice would show."""
    got, count = list(got), 0
    for native, ours in zip(expected, got, strict=True):
        assert ours[2:] == native[2:]
        for a, b in zip(ours[:2], native[:2], strict=True):
            assert a.device == b.device
            torch.testing.assert_close(a, b, rtol=1e-6, atol=atol)
        count += 1
    assert count > 0


def workers():
    return {process.pid for process in multiprocessing.active_children() if not process.name.startswith(NAME)}


@needs_dali
@pytest.mark.parametrize("num_data_workers", [0, 2])
def test_training_gives_the_batches_of_the_native_loader_from_any_iteration(loaders, num_data_workers):
    """25 batches of 4 of 38 samples: the third epoch has begun; iteration 7 is within the first."""
    keys = {"n_out_channels": 5, "num_data_workers": num_data_workers, "input_frames": 2}
    native, dali = loaders(**keys, data_loader_config="pytorch")[0], loaders(**keys)[0]
    for start, stop in ((0, 25), (7, 12)):
        assert_same_batches(dali.train(3, start, stop), native.train(3, start, stop))
    for name in ("n_in", "n_out", "batch_size", "device"):
        assert getattr(dali, name) == getattr(native, name)
    assert np.array_equal(dali.statistics.time_means, native.statistics.time_means)


@needs_dali
@pytest.mark.parametrize("num_data_workers", [0, 2])
def test_every_validation_covers_all_samples_and_ends_its_processes(loaders, num_data_workers):
    """19 samples in batches of 4: the last batch has one repeated sample."""
    native = loaders(n_in_channels=3, data_loader_config="pytorch")[1]
    dali = loaders(n_in_channels=3, num_data_workers=num_data_workers)[1]
    assert_same_batches(dali.valid(), native.valid())
    assert workers() == set()
    next(dali.valid())  # left early
    assert workers() == set()
    assert_same_batches(dali.valid(), native.valid())


@needs_dali
@pytest.mark.parametrize("storage", [{}, {"chunks": (1, 1, 4, 16)}], ids=["contiguous", "chunked"])
@pytest.mark.parametrize("num_data_workers", [0, 1])
def test_processes_read_the_same_part_of_the_same_files(tmp_path, storage, num_data_workers):
    write_years(tmp_path, [9, 6], **storage)
    given = Statistics(np.full((2, 1, 1), 0.5, np.float32), np.float32([[[2]], [[3]]]), None)
    native, dali = (
        loader_class(name)(
            FieldDataset(tmp_path, 2, (8, 16), dt=2, limit=10, rows=slice(3, 7), columns=slice(1, 15)),
            given, n_in=2, n_out=1, batch_size=3, device=CPU, num_workers=num_data_workers,
        )
        for name in ("pytorch", "dali")
    )  # fmt: skip
    (tmp_path / "1970.h5").write_text("came after the loader was made")
    assert_same_batches(dali.valid(), native.valid(), atol=1e-6)
    dali.close()


@needs_dali
@pytest.mark.parametrize("num_data_workers", [0, 2])
def test_a_file_truncated_after_the_start_is_named(tmp_path, sample_folder, loaders, num_data_workers):
    shutil.copytree(sample_folder / "train", tmp_path / "train")
    loader, _ = loaders(train_data_path=str(tmp_path / "train"), num_data_workers=num_data_workers)
    os.truncate(tmp_path / "train/1980.h5", 100_000)
    with refusal("1980.h5: .*cannot be read"):
        list(loader.train(0, 0, 20))
    assert workers() == set()


@needs_dali
def test_a_lost_process_is_an_error_that_ends_the_others(loaders):
    loader, _ = loaders(num_data_workers=2)
    batches = loader.train(0, 0, 30)
    next(batches)
    other, victim = workers()
    for name in ("TERM", "USR1", "INT"):
        subprocess.run(["kill", f"-{name}", str(other)], check=True)  # not from the trainer: ignored
    time.sleep(0.2)
    next(batches)
    os.kill(victim, signal.SIGKILL)
    with refusal("a data worker ended with exit code -9"):
        list(batches)
    assert workers() == set()


@pytest.mark.slow("a second loss while the first is asked for")
@needs_dali
def test_a_second_loss_while_the_first_is_asked_for_leaves_no_process_that_seems_to_live(loaders, monkeypatch):
    """The signal of another process that ends comes in between the system's answer and its being noted."""
    asked = os.waitpid

    def answer_and_signal(pid, flags):
        if threading.current_thread() is not threading.main_thread():
            return 0, 0  # DALI's thread asks too, and may be the first: not here
        answer = asked(pid, flags)
        if answer[0]:
            signal.raise_signal(signal.SIGCHLD)
        return answer

    loader, _ = loaders(num_data_workers=2)
    batches = loader.train(0, 0, 30)
    next(batches)
    victim, _ = workers()
    monkeypatch.setattr(os, "waitpid", answer_and_signal)
    os.kill(victim, signal.SIGKILL)
    with refusal("a data worker ended with exit code -9"):
        list(batches)
    assert workers() == set()


@needs_dali
def test_closing_in_mid_epoch_ends_the_processes(tiny_config):
    loader, _ = build_task(tiny_config(data_loader_config="dali", num_data_workers=1)).build_loaders(CPU)
    batches = loader.train(0, 0, 30)
    next(batches)
    loader.close()  # the generator is still there
    assert workers() == set()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


OF_PROGRAM = pytest.mark.slow("processes of a training program, and how they end with it")


@pytest.fixture
def trainer(tiny_options, tmp_path):
    """train.py with DALI in a process group of its own, training, and its worker processes."""
    words = tiny_options(data_loader_config="dali", num_data_workers=2, num_iters=100_000, validate_every=100_000)
    log, processes = tmp_path / "logs/quick/00/out.log", []
    process = programs.start(["train.py", *words], merged=True)
    try:
        wait_until(lambda: process.poll() is not None or (log.exists() and "for epoch 1" in log.read_text()))
        assert process.poll() is None, process.said()
        processes = children(process.pid)
        yield process, processes
    finally:
        for left_over in filter(alive, processes):
            os.kill(left_over, signal.SIGKILL)


@OF_PROGRAM
@needs_dali
def test_no_process_imports_torch_or_outlives_a_killed_trainer(trainer):
    process, processes = trainer
    assert len(processes) >= 2
    assert not any("libtorch" in Path(f"/proc/{one}/maps").read_text() for one in processes)
    process.kill()
    wait_until(lambda: not any(map(alive, processes)), 20)


@OF_PROGRAM
@needs_dali
@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGUSR1, signal.SIGTERM]])
def test_signals_to_the_whole_group_let_the_trainer_save(trainer, tmp_path, numbers):
    process, processes = trainer
    for number in numbers:
        os.killpg(process.pid, number)
    assert process.wait(timeout=60) == 75, process.said()
    assert "Saved checkpoint" in (tmp_path / "logs/quick/00/out.log").read_text()
    wait_until(lambda: not any(map(alive, processes)), 20)


def test_without_dali_one_line_says_what_to_install_before_anything_is_read(tiny_options, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.delitem(sys.modules, "utils.data_loader_dali", raising=False)
    with refusal("pip install -r requirements/dali.txt"):
        train.main(tiny_options(data_loader_config="dali", train_data_path="nowhere"))


@pytest.mark.gpu
@needs_dali
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_data_workers", [0, 2])
def test_on_a_gpu_the_batches_are_those_of_the_native_loader(loaders, num_data_workers):
    gpu = torch.device("cuda", torch.cuda.current_device())
    keys = {"device": gpu, "n_out_channels": 5, "num_data_workers": num_data_workers}
    native, dali = loaders(**keys, data_loader_config="pytorch"), loaders(**keys)
    assert_same_batches(dali[0].train(3, 7, 30), native[0].train(3, 7, 30))
    for _ in range(2):
        assert_same_batches(dali[1].valid(), native[1].valid())
