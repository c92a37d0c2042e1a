"""Inputs beside the state, against plain formulas, and the frames of a forecast of several steps."""

import h5py
import numpy as np
import pytest
import torch

from tests.support.refusals import refusal
from training.tasks import build_task
from utils import comm
from utils.data_loader import DataLoader
from utils.errors import UsageError
from weather.fields.grid import latitudes, longitudes
from weather.years.dataset import FieldDataset
from weather.years.forcings import Forcings

CPU = torch.device("cpu")
SIZE = (16, 32)
ALL = ["orography", "day", "hour", "latitude"]
DATES = np.array([["2016-02-29T18", "2016-03-01T00"], ["1999-01-01T06", "1999-12-31T12"]], "datetime64[s]")


@pytest.fixture
def dataset(sample_folder):
    opened = FieldDataset(sample_folder / "train", 20, SIZE, steps=3)
    yield opened
    opened.close()


def made(dataset, names):
    return Forcings(names, dataset, CPU)


def test_they_are_the_sun_s_time_the_latitude_and_fields_of_the_file(dataset):
    found = made(dataset, ALL)(DATES).double().numpy()
    assert found.shape == (2, 2 + 2 * 4, *SIZE)
    orography = dataset.files[0].arrays["orography"].values.astype(float)
    np.testing.assert_allclose(found[1, 0], (orography - orography.mean()) / orography.std(), atol=1e-5)
    np.testing.assert_allclose(found[0, 1], np.sin(np.deg2rad(latitudes(16)))[:, None].repeat(32, 1), atol=1e-6)
    for i, j in np.ndindex(2, 2):
        date = DATES[i, j].astype(object)
        hours = date.hour + longitudes(32) / 15  # local solar time
        day = (date - date.replace(month=1, day=1, hour=0)).total_seconds() / 86400 / 365.25
        hour_angle, day_angle = 2 * np.pi * hours / 24, np.full(32, 2 * np.pi * day)
        expected = [np.cos(hour_angle), np.cos(day_angle), np.sin(hour_angle), np.sin(day_angle)]
        for channel, row in zip(found[i, 2 + 4 * j :], expected, strict=False):
            np.testing.assert_allclose(channel, np.broadcast_to(row, SIZE), atol=2e-6)


def test_a_part_of_the_image_has_its_part_of_them(dataset):
    whole = made(dataset, ALL)(DATES)
    dataset.rows, dataset.columns = slice(5, 9), slice(8, 20)
    part = made(dataset, ALL)(DATES)
    assert torch.equal(part, whole[:, :, 5:9, 8:20])


@pytest.mark.parametrize("names", [["hour"], ["latitude"], ["day", "orography"]])
def test_any_of_them_can_be_left_out(dataset, names):
    assert made(dataset, names)(DATES).shape[1] == {"hour": 4, "latitude": 1, "day": 5}[names[0]]


def test_a_field_that_is_the_same_everywhere_is_refused(tmp_path):
    with h5py.File(tmp_path / "2000.h5", "w") as file:
        file["fields"], file["land"] = np.zeros((3, 1, 4, 8), "f4"), np.ones((4, 8))
    dataset = FieldDataset(tmp_path, 1, (4, 8))
    with refusal(r"2000.h5: forcing 'land' is the same everywhere, or not finite"):
        made(dataset, ["land"])


def batches(config, kind=None):
    comm.build_mesh(CPU, config.layout(1))
    task = build_task(config)
    loader = task.loaders(CPU)[0]
    if kind:
        train = loader.dataset
        shared = loader.statistics, 20, 20, config.global_batch_size, CPU, config.num_data_workers
        loader = kind(train, *shared, Forcings(config.forcings, train, CPU), config.rollout_stages)
    try:
        return [(x.clone(), y.clone()) for x, y in loader.train(config.seed, 0, 6)]
    finally:
        loader.close()


@pytest.mark.parametrize("dt", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_delivers_the_frames_of_each_stage_and_their_forcings(tiny_config, dt, workers):
    options = {"forcings": ALL, "rollout_schedule": [[2, 3], [4, 2]], "num_data_workers": workers, "dt": dt}
    config = tiny_config(**options, num_iters=6)
    folder = FieldDataset(config.train_data_path, 20, SIZE, dt, steps=3)
    means, stds = (np.load(getattr(config, f"global_{name}_path"))[0] for name in ("means", "stds"))
    comm.build_mesh(CPU, config.layout(1))
    task = build_task(config)
    samples = task.loaders(CPU)[0].order(config.seed).samples
    for iteration, (x, y) in enumerate(batches(config)):
        k, numbers = (1, 1, 3, 3, 2, 2)[iteration], samples(iteration)
        assert x.shape == (4, 20 + 2 + 4 * k, *SIZE)
        assert y.shape == (4, 20 * k, *SIZE)
        frames = np.empty((4, k + 1, 20, *SIZE), np.float32)
        for number, out in zip(numbers, frames, strict=True):
            folder.read(number, out)
        frames = (frames - means) / stds
        np.testing.assert_allclose(x[:, :20], frames[:, 0], atol=1e-4)
        np.testing.assert_allclose(y, frames[:, 1:].reshape(y.shape), atol=1e-4)
        assert torch.equal(x[:, 20:], made(folder, ALL)(folder.dates(numbers, k)))
        spaced = np.diff(folder.dates(numbers, k), axis=1) == dt * np.timedelta64(6, "h")
        assert spaced.all()


def test_dali_delivers_the_same(tiny_config):
    dali = pytest.importorskip("utils.data_loader_dali", exc_type=UsageError).DaliDataLoader
    config = tiny_config(forcings=ALL, rollout_schedule=[[2, 3]], num_iters=6)
    for native, other in zip(batches(config, DataLoader), batches(config, dali), strict=True):
        for one, two in zip(native, other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
