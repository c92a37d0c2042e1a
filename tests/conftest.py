"""Fixtures: a small sample data set, made once for all tests, and configs over it."""

import gc
import logging
import os

os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors; processes of a test must not fight over the cores
# A test names its device. Where no GPU is, `auto` fails in every process of a test: utils.device.promised_gpus.
os.environ["SLURM_GPUS_ON_NODE"] = "1"

import multiprocessing
import sqlite3  # noqa: F401  # before eccodes, which brings an older library of that name: mlflow needs ours
from pathlib import Path

import pytest
import torch

from tests.support import forked, pictures, programs, temporary
from tests.support.workers import Workers
from utils.config import check_config, read_named_config
from utils.device import VISIBLE
from weather.sample_data import make_sample_data

OWNS_FOLDER = temporary.use_own_folder()
IMG_SIZE = (16, 32)
TINY = {
    "img_size": list(IMG_SIZE),
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "global_batch_size": 4,
    "device": "cpu",
}


def make_data(folder):
    """Make sample data of 16 x 32 points: 2 training years, 1 validation and 1 test year of 5 days (20 frames) each.

    Returns the config keys that point to them.
    """
    make_sample_data(
        folder, img_size=IMG_SIZE, train_years=[1979, 1980], valid_years=[1981], test_years=[1982], days=5, seed=1
    )
    return {
        "train_data_path": str(folder / "train"),
        "valid_data_path": str(folder / "valid"),
        "inf_data_path": str(folder / "test"),
        **{f"{k}_path": str(folder / f"stats/{k}.npy") for k in ("global_means", "global_stds", "time_means")},
    }


@pytest.fixture(scope="session")
def data_keys(tmp_path_factory):
    """The config keys that point to sample data."""
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def sample_folder(data_keys):
    """The folder of the sample data."""
    return Path(data_keys["train_data_path"]).parent


@pytest.fixture(scope="session")
def tiny_settings(data_keys):
    """The config keys of a short run of a tiny model on the sample data; `expdir` is to be added."""
    return TINY | data_keys | {"num_iters": 12, "warmup": 2}


@pytest.fixture
def tiny_config(tiny_settings, tmp_path):
    """Call with overrides to get a Config of such a run, its folder in the test's folder."""

    def make(**overrides):
        settings = read_named_config("config/ViT.yaml", "quick")
        return check_config(settings | tiny_settings | {"expdir": str(tmp_path / "logs")} | overrides, "quick", "test")

    return make


@pytest.fixture
def tiny_options(tiny_settings, tmp_path):
    """The same as command-line options; call with overrides, None leaves an option out."""
    return lambda **overrides: words_of(tiny_settings | {"expdir": tmp_path / "logs"} | overrides)


def words_of(settings):
    """Command-line options of the config `quick`; a key that is None is left out."""
    words = ["--config=quick"]
    for name, value in settings.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return words


@pytest.fixture(scope="session", autouse=True)
def _processes_start_in_milliseconds():
    """Fork the processes that benchmarks start by "spawn" from a server that has imported everything."""
    forked.context().set_forkserver_preload([*forked.PRELOAD, *forked.EXERCISES, "tests.support.warm"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", forked.instead_of_spawn(forked.context()))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_pictures():
    pictures.draw_none()


@pytest.fixture(name="pictures")
def _pictures(monkeypatch):
    """Trainings of this test draw pictures."""
    monkeypatch.setattr("training.tasks.validation.PICTURED", pictures.PICTURED)


@pytest.fixture(scope="session")
def ranks():
    """Call as ranks(world_size, function, ...): see tests/support/workers.py."""
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def _clean_slate():
    """Seeds fixed before a test; programs ended and log files closed after it."""
    torch.manual_seed(0)
    yield
    programs.end_all()
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler).__module__.startswith(("training", "logging")) and not hasattr(handler, "records"):
            root.removeHandler(handler)
            handler.close()


def pytest_configure(config):
    if config.option.markexpr != "gpu":
        # The tests fork processes, which cannot use CUDA once the process that they come from has looked for a GPU.
        for name in VISIBLE:
            os.environ[name] = "-1"  # no GPU has this number; "" would say that training on the CPU is meant
    elif not config.option.collectonly and not torch.cuda.is_available():
        pytest.exit("no GPU is there, which the tests marked gpu need", 2)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what is imported is not looked at again, which took a twelfth of the tests' time
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Whatever the tests leave in the temporary folder fails the session."""
    temporary.remove_made()
    if not OWNS_FOLDER:
        return
    left = temporary.left_behind()
    if left:
        print(f"\nleft in the temporary folder: {', '.join(left[:9])} ({len(left)})")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure():
    gc.unfreeze()  # nanobind, in torch's triton, would report all that is left when Python ends


def pytest_collection_modifyitems(items):
    for item in items:
        for mark in item.iter_markers("slow"):
            if not (mark.args and isinstance(mark.args[0], str) and mark.args[0].strip()):
                raise pytest.UsageError(f'{item.nodeid}: say @pytest.mark.slow("what only this test can show")')
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and `-m gpu`"))
