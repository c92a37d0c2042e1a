"""Samples from disk: the right bytes, every one once, in an order that seed and epoch decide."""

import os
import shutil

import h5py
import numpy as np
import pytest
import torch

from tests.support.refusals import refusal
from training.tasks import build_task
from utils.sample_order import Order, training_indices
from weather.years.dataset import FieldDataset

CPU = torch.device("cpu")


def write_years(folder, lengths, shape=(3, 8, 16), **storage):
    """Year files of random numbers; returns them as arrays."""
    folder.mkdir(exist_ok=True)
    random, years = np.random.default_rng(0), []
    for number, length in enumerate(lengths):
        years.append(random.standard_normal((length, *shape), dtype=np.float32))
        with h5py.File(folder / f"{1979 + number}.h5", "w") as file:
            file.create_dataset("fields", data=years[-1], **storage)
    return years


def read_all(dataset):
    """All samples."""
    out = np.empty((len(dataset), *dataset.shape), np.float32)
    for index in range(len(dataset)):
        dataset.read(index, out[index])
    return out


STORAGES = {
    "contiguous": {},
    "chunk per frame": {"chunks": (1, 3, 8, 16)},
    "chunk per channel": {"chunks": (2, 1, 8, 16)},
    "compressed": {"chunks": (1, 3, 4, 16), "compression": "gzip"},
}


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
@pytest.mark.parametrize("dt", [1, 2])
def test_samples_are_the_pairs_dt_apart_of_files_of_any_length(tmp_path, storage, dt):
    years = write_years(tmp_path, [5, 4, 7], **storage)
    expected = [np.stack([year[t], year[t + dt]]) for year in years for t in range(len(year) - dt)]
    np.testing.assert_array_equal(read_all(FieldDataset(tmp_path, 3, (8, 16), dt)), expected)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(slice(3, 5), None), (slice(0, 7), None), (None, slice(4, 9)), (slice(5, 8), slice(1, 16))]
)
def test_a_window_is_that_part_of_the_image(tmp_path, storage, rows, columns):
    years = write_years(tmp_path, [4, 3], **STORAGES[storage])
    whole = np.concatenate([np.stack([year[:-1], year[1:]], axis=1) for year in years])
    dataset = FieldDataset(tmp_path, 2, (8, 16), rows=rows, columns=columns)
    expected = whole[:, :, :2, rows or slice(None), columns or slice(None)]
    np.testing.assert_array_equal(read_all(dataset), expected)


def test_an_image_smaller_than_the_file_is_its_first_rows_and_columns(tmp_path):
    (year,) = write_years(tmp_path, [4])
    dataset = FieldDataset(tmp_path, 3, (7, 12))
    np.testing.assert_array_equal(read_all(dataset)[:, 0], year[:-1, :, :7, :12])


def test_contiguous_files_are_read_without_a_byte_too_many(tmp_path, monkeypatch):
    write_years(tmp_path, [6])
    asked, preadv = [], os.preadv

    def counting(descriptor, views, position):
        asked.append(sum(memoryview(view).nbytes for view in views))
        return preadv(descriptor, views, position)

    monkeypatch.setattr(os, "preadv", counting)
    for dataset, reads in (
        (FieldDataset(tmp_path, 3, (8, 16)), 1),  # two whole frames, adjacent on disk
        (FieldDataset(tmp_path, 3, (8, 16), rows=slice(2, 5)), 6),  # a band of each channel of each frame
        (FieldDataset(tmp_path, 2, (8, 16), dt=3), 4),  # a channel of each frame
    ):
        asked.clear()
        out = np.empty(dataset.shape, np.float32)
        dataset.read(1, out)
        assert (len(asked), sum(asked)) == (reads, out.nbytes)


def test_coordinates_and_names_come_from_the_file_or_are_those_of_era5(tmp_path, sample_folder):
    write_years(tmp_path, [3])
    dataset = FieldDataset(tmp_path, 3, (8, 16))
    assert dataset.description.names == ["u10", "v10", "t2m"]
    assert dataset.description.units == ["m s-1", "m s-1", "K"]
    np.testing.assert_allclose(dataset.description.grid.latitude, 90 - 22.5 * np.arange(8))
    np.testing.assert_allclose(dataset.description.grid.longitude, 22.5 * np.arange(16))
    dataset.close()
    with h5py.File(tmp_path / "1979.h5", "a") as file:
        file["latitude"] = np.linspace(-70, 70, 8)
        file["channel"] = ["a", "b", "c"]
    dataset = FieldDataset(tmp_path, 2, (8, 16))
    assert dataset.description.names == ["a", "b"]
    np.testing.assert_allclose(dataset.description.grid.latitude, np.linspace(-70, 70, 8))
    assert FieldDataset(sample_folder / "train", 20, (16, 32)).description.names[14] == "z500"


@pytest.mark.parametrize(("samples", "batch"), [(10, 3), (38, 4), (12, 12), (7, 5)])
def test_every_sample_comes_once_an_epoch(samples, batch):
    stream = np.concatenate([training_indices(samples, batch, 0, i) for i in range(3 * samples)])
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    assert not np.array_equal(stream[:samples], stream[samples : 2 * samples])
    other_seed = np.concatenate([training_indices(samples, batch, 1, i) for i in range(samples)])
    assert not np.array_equal(stream[:samples], other_seed[:samples])


def train_loader(config):
    return build_task(config).build_loaders(CPU)[0]


def collect(batches):
    return [tuple(part.clone() if isinstance(part, torch.Tensor) else part for part in batch) for batch in batches]


def same(batches, others):
    pairs = zip(batches, others, strict=True)
    return all(torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) for one, two in pairs)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 3), (4, 2), (1, 4)])
def test_micro_batches_of_all_ranks_are_those_of_one_device(ranks, micro_batches):
    size = 12 * 2 // ranks
    whole = Order(50, size * ranks, 0, 1, seed=3).samples(5)
    own = [Order(50, size, rank, ranks, seed=3, micro_batches=micro_batches).samples(5) for rank in range(ranks)]
    parts = [np.split(samples, micro_batches) for samples in own]
    for number, expected in enumerate(np.split(whole, micro_batches)):
        found = np.concatenate([of_rank[number] for of_rank in parts])
        assert found.tolist() == expected.tolist()


def test_batches_are_the_normalised_fields(tiny_config, sample_folder):
    config = tiny_config(n_out_channels=5)
    loader = train_loader(config)
    frames = [h5py.File(path, locking=False)["fields"][:] for path in sorted((sample_folder / "train").glob("*.h5"))]
    pairs = [(year[t], year[t + 1]) for year in frames for t in range(len(year) - 1)]
    means, stds = np.load(config.global_means_path)[0], np.load(config.global_stds_path)[0]
    for i, (x, y) in enumerate(loader.train(seed=0, start=0, stop=3)):
        for b, index in enumerate(training_indices(len(pairs), 4, 0, i)):
            np.testing.assert_allclose(x[b], (pairs[index][0] - means) / stds, atol=1e-4)
            np.testing.assert_allclose(y[b], ((pairs[index][1] - means) / stds)[:5], atol=1e-4)


@pytest.mark.parametrize("dt", [1, 2])
def test_an_input_of_several_frames_has_the_present_one_first(tiny_config, sample_folder, dt):
    config = tiny_config(input_frames=3, rollout_steps=2, dt=dt, forcings=["day"])
    loader = train_loader(config)
    frames = [h5py.File(path, locking=False)["fields"][:] for path in sorted((sample_folder / "train").glob("*.h5"))]
    samples = [year[t : t + 4 * dt + 1 : dt] for year in frames for t in range(len(year) - 4 * dt)]
    means, stds = np.load(config.global_means_path)[0], np.load(config.global_stds_path)[0]
    (x, y), indices = next(loader.train(seed=0, start=0, stop=1)), training_indices(len(samples), 4, 0, 0)
    for b, index in enumerate(indices):
        whole = (samples[index] - means) / stds
        np.testing.assert_allclose(x[b, :60], np.concatenate([whole[2], whole[1], whole[0]]), atol=1e-4)
        np.testing.assert_allclose(y[b], np.concatenate([whole[3], whole[4]]), atol=1e-4)
    first = loader.dataset.times[0][2 * dt :]  # of the present frames, and of the steps from them
    np.testing.assert_array_equal(loader.dataset.dates([0, 1], 2), [first[: 2 * dt : dt], first[1 : 1 + 2 * dt : dt]])


@pytest.mark.parametrize("workers", [1, 3])
def test_worker_threads_change_nothing(tiny_config, workers):
    serial, threaded = (
        train_loader(c) for c in (tiny_config(num_data_workers=0), tiny_config(num_data_workers=workers))
    )
    assert same(collect(serial.train(3, 0, 25)), collect(threaded.train(3, 0, 25)))
    threaded.close()


def test_a_run_that_starts_in_mid_epoch_sees_the_same_batches(tiny_config):
    config = tiny_config(num_data_workers=2)
    loader = train_loader(config)
    whole, rest = collect(loader.train(0, 0, 15)), collect(loader.train(0, 7, 15))
    assert same(whole[7:], rest)


def test_a_loader_left_early_can_be_used_again(tiny_config):
    config = tiny_config(num_data_workers=2)
    loader = train_loader(config)
    expected = collect(loader.train(0, 0, 6))
    for _ in range(3):
        batches = loader.train(0, 0, 6)
        next(batches)
        batches.close()
    assert same(expected, collect(loader.train(0, 0, 6)))


@pytest.mark.parametrize("batch", [1, 4, 7, 19, 30])
def test_validation_covers_every_sample_once_in_batches_of_one_shape(tiny_config, batch):
    config = tiny_config(global_batch_size=batch)
    loader = build_task(config).build_loaders(CPU)[1]
    one = build_task(tiny_config(global_batch_size=1)).build_loaders(CPU)[1]
    batches = collect(loader.valid())
    assert {tuple(x.shape) for x, _, _ in batches} == {(batch, 20, 16, 32)}
    got = torch.cat([x[:count] for x, _, count in batches])
    assert torch.equal(got, torch.cat([x for x, _, _ in collect(one.valid())]))
    assert len(got) == 19


def test_limit_takes_the_first_samples(tiny_config):
    config = tiny_config(limit_nsamples=6, limit_nsamples_val=3)
    train, valid = build_task(config).build_loaders(CPU)
    assert (len(train.dataset), len(valid.dataset)) == (6, 3)


def test_a_chunked_file_truncated_after_the_start_is_named(tmp_path):
    write_years(tmp_path, [6], chunks=(1, 1, 8, 16))
    dataset = FieldDataset(tmp_path, 3, (8, 16))
    os.truncate(tmp_path / "1979.h5", 3000)
    with refusal("1979.h5: frame . cannot be read"):
        read_all(dataset)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_truncated_after_the_start_is_named(tmp_path, tiny_config, sample_folder, workers):
    shutil.copytree(sample_folder / "train", tmp_path / "train")
    config = tiny_config(train_data_path=str(tmp_path / "train"), num_data_workers=workers)
    loader = train_loader(config)
    os.truncate(tmp_path / "train/1980.h5", 100_000)
    with refusal("1980.h5: frame .* cannot be read: the file was truncated"):
        collect(loader.train(0, 0, 20))


@pytest.mark.parametrize("kind", ["external link", "virtual"])
def test_fields_that_lie_in_another_file_are_read_from_there(tmp_path, kind):
    """Offsets in that file would be taken for offsets in this one."""
    fields = np.random.default_rng(0).normal(size=(3, 2, 4, 8)).astype("f4")
    (tmp_path / "year").mkdir()
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["fields"] = fields
    with h5py.File(tmp_path / "year" / "1980.h5", "w") as file:
        if kind == "virtual":
            layout = h5py.VirtualLayout(fields.shape, "f4")
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "fields", fields.shape)
            file.create_virtual_dataset("fields", layout)
        else:
            file["padding"] = np.zeros(1000)
            file["fields"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "fields")
    dataset = FieldDataset(tmp_path / "year", 2, (4, 8))
    out = np.zeros(dataset.shape, np.float32)
    dataset.read(1, out)
    np.testing.assert_array_equal(out, fields[1:])
    dataset.close()


def test_validation_data_of_other_channels_are_refused(tmp_path, tiny_config, sample_folder):
    shutil.copytree(sample_folder / "valid", tmp_path / "valid")
    for path in (tmp_path / "valid").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            file["channel"][0] = "speed"
    with refusal(r"valid/.*channel 0 is 'speed' and not 'u10', as in .*train/1979.h5"):
        build_task(tiny_config(valid_data_path=str(tmp_path / "valid"))).loaders(torch.device("cpu"))


def test_a_value_that_is_no_number_is_named(tmp_path, sample_folder):
    shutil.copytree(sample_folder / "train", tmp_path / "train")
    path = tmp_path / "train/1980.h5"
    with h5py.File(path, "r+") as file:
        file["fields"][3, 2, 1, 1] = np.inf
    dataset = FieldDataset(tmp_path / "train", 20, (16, 32))
    first = dataset.first_sample[1]
    dataset.check_finite(first)
    for sample in (first + 2, first + 3):
        with refusal(rf"{path}: frame 3: channel 2 \(t2m\) holds inf"):
            dataset.check_finite(sample)
