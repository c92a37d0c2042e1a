"""Fixtures: a small sample data set, made once for all tests, and configs over it."""

import logging
import os

os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors; processes of a test must not fight over the cores

import pytest
import torch

from tests.support.workers import Workers
from utils.config import check_config, read_named_config
from weather.sample_data import make_sample_data

IMG_SIZE = (16, 32)
TINY = {
    "img_size": list(IMG_SIZE),
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "global_batch_size": 4,
}


@pytest.fixture(scope="session")
def sample_folder(tmp_path_factory):
    """16 x 32 points; 2 training years, 1 validation and 1 test year of 5 days (20 frames) each."""
    folder = tmp_path_factory.mktemp("data")
    make_sample_data(
        folder, img_size=IMG_SIZE, train_years=[1979, 1980], valid_years=[1981], test_years=[1982], days=5, seed=1
    )
    return folder


@pytest.fixture
def data_keys(sample_folder):
    """The config keys that point to the sample data."""
    return {
        "train_data_path": str(sample_folder / "train"),
        "valid_data_path": str(sample_folder / "valid"),
        "inf_data_path": str(sample_folder / "test"),
        **{f"{k}_path": str(sample_folder / f"stats/{k}.npy") for k in ("global_means", "global_stds", "time_means")},
    }


@pytest.fixture
def tiny_config(data_keys, tmp_path):
    """Call with overrides to get a Config of a tiny model on the sample data, its runs in the test's folder."""

    def make(**overrides):
        settings = read_named_config("config/ViT.yaml", "quick")
        settings |= TINY | data_keys | {"expdir": str(tmp_path / "logs"), "num_iters": 12, "warmup": 2}
        return check_config(settings | overrides, "quick", "test")

    return make


@pytest.fixture
def tiny_options(data_keys, tmp_path):
    """The same as command-line options; call with overrides, None leaves an option out."""

    def make(**overrides):
        settings = {**TINY, **data_keys, "expdir": str(tmp_path / "logs"), "num_iters": 12, "warmup": 2} | overrides
        words = ["--config=quick"]
        for name, value in settings.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not None:
                words += [f"--{name}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
        return words

    return make


@pytest.fixture(scope="session")
def ranks():
    """Call as ranks(world_size, function, ...): see tests/support/workers.py."""
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def _clean_slate():
    """Seeds fixed before a test; log files closed after it."""
    torch.manual_seed(0)
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler).__module__.startswith(("training", "logging")) and not hasattr(handler, "records"):
            root.removeHandler(handler)
            handler.close()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
