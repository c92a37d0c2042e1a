"""Years in Zarr stores give the samples of year files, are trained to the same weights, and are refused as clearly."""

import re
import shutil
from contextlib import closing

import h5py
import numpy as np
import pytest
import xarray
import zarr

from docs.examples import zarr_years
from tests.support import programs
from tests.support.launch import losses
from tests.support.refusals import refusal
from tests.test_data_loader import CPU, read_all
from tests.test_data_loader_dali import assert_same_batches, needs_dali
from training.tasks import build_task
from weather import year_files
from weather.dataset import FieldDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
STORED = {"plain 2": [], "plain 3": ["--zarr_format=3"], "compressed 3": ["--zarr_format=3", "--compressed"]}


@pytest.fixture(scope="session")
def stores(sample_folder, tmp_path_factory):
    """{how it is stored: the sample data as stores}."""
    folders = {name: tmp_path_factory.mktemp("stores") / "data" for name in STORED}
    for name, folder in folders.items():
        zarr_years.main([str(sample_folder), str(folder), *STORED[name]])
    return folders


def paths_in(folder):
    return {f"{name}_data_path": str(folder / split) for name, split in (("train", "train"), ("valid", "valid"))}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("window", [{}, {"rows": slice(3, 9)}, {"rows": slice(1, 7), "columns": slice(5, 30)}])
def test_every_window_of_a_store_is_that_of_the_year_file(stores, sample_folder, stored, window):
    ours, theirs = (FieldDataset(f / "train", 20, (16, 32), **window) for f in (stores[stored], sample_folder))
    np.testing.assert_array_equal(read_all(ours), read_all(theirs))
    assert set(ours.listing()) == {"train/1979.zarr", "train/1980.zarr"}
    assert not ours.description.difference(theirs.description) and ours.description.names[14] == "z500"
    np.testing.assert_array_equal(ours.times[1], theirs.times[1])
    np.testing.assert_array_equal(
        ours.files[0].constant_field("orography"), theirs.files[0].constant_field("orography")
    )


def test_statistics_of_stores_are_those_of_year_files(stores, sample_folder, tmp_path):
    year_files.main([str(stores["compressed 3"] / "train"), str(tmp_path)])
    for path in (sample_folder / "stats").glob("*.npy"):
        np.testing.assert_array_equal(np.load(tmp_path / path.name), np.load(path))


def test_runs_on_stores_have_the_losses_of_year_files_bit_for_bit(stores, tiny_options, tmp_path):
    """Rungs 1 and 4, plain and compressed."""
    shard = ["train_shard.py", "--yaml_config=config/ViT.yaml", "--domain_parallel=1x2"]
    common = {"num_data_workers": 2, "forcings": ["orography", "hour"], "num_iters": 12}
    for name, folder in {"hdf5": None, **stores}.items():
        data = common | (paths_in(folder) if folder else {})
        assert programs.run(["train.py", *tiny_options(run_num=f"one {name}", **data)]).returncode == 0
        for status, output in programs.run_ranks([*shard, *tiny_options(run_num=f"shard {name}", **data)]):
            assert status == 0, output
        for layout in ("one", "shard"):
            assert losses(tmp_path, f"{layout} {name}") == losses(tmp_path, f"{layout} hdf5"), (layout, name)


@needs_dali
@pytest.mark.timeout(100)
def test_the_processes_of_dali_read_stores(stores, tiny_config):
    kinds = {"data_loader_config": "dali", "num_data_workers": 1}, {}
    loaders = [build_task(tiny_config(**paths_in(stores["plain 2"]), **kind)).build_loaders(CPU)[0] for kind in kinds]
    with closing(loaders[0]), closing(loaders[1]):
        assert_same_batches(*(loader.train(seed=1, start=2, stop=6) for loader in loaders))


def test_a_netcdf_file_is_a_year_file(tmp_path, sample_folder):
    (tmp_path / "train").mkdir()
    shutil.copy(sample_folder / "train/1979.h5", tmp_path)  # tests before this one may hold the original open
    with xarray.open_dataset(tmp_path / "1979.h5", engine="h5netcdf", decode_times=False) as year:
        fields = year.load().drop_vars(["channel"])  # a dimension without values
    fields.to_netcdf(tmp_path / "train/1979.nc", engine="h5netcdf")
    theirs = FieldDataset(sample_folder / "train", 20, (16, 32), limit=19)
    ours = FieldDataset(tmp_path / "train", 20, (16, 32))
    np.testing.assert_array_equal(read_all(ours), read_all(theirs))
    assert ours.description.names[0] == "u10"
    shutil.copytree(sample_folder / "train", tmp_path / "train", dirs_exist_ok=True)
    with refusal("holds 1979.h5 and 1979.nc: the same year twice"):
        FieldDataset(tmp_path / "train", 20, (16, 32))


def edited(path, change):
    change(zarr.open_group(path, mode="r+"), path)


def attributes(name, values):
    def change(group, _path):
        del group[name]
        group.create_array(name, data=values)

    return change


DAMAGE = {
    "a chunk is absent": (lambda _, path: (path / "fields/7.0.0.0").unlink(), "1 chunks of 'fields' were never"),
    "no fields": (lambda group, _: group.__delitem__("fields"), "expected 'fields' [time, channel, lat, lon]"),
    "whole numbers": (attributes("fields", np.ones((4, 20, 16, 32), "i4")), "it has int32 (4, 20, 16, 32)"),
    "channels are flags": (attributes("channel", np.ones(20, bool)), "'channel' cannot be read: bool is not text"),
    "another size": (attributes("longitude", np.ones(3)), "'longitude' has shape (3,), the fields need (32,)"),
    "no store": (lambda _, path: (path / ".zgroup").unlink(), "Zarr cannot be read"),
    "metadata": (lambda _, path: (path / "fields/.zarray").write_text("{"), "Zarr cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_store_that_is_damaged_or_other_is_named_in_one_line(stores, tmp_path, damage):
    shutil.copytree(stores["plain 2"] / "train", tmp_path / "train")
    path, (change, line) = tmp_path / "train/1980.zarr", DAMAGE[damage]
    edited(path, change)
    with refusal(re.escape(line), path):
        FieldDataset(tmp_path / "train", 20, (16, 32))


def test_shards_are_refused_and_what_is_no_number_is_named(stores, tmp_path):
    store = tmp_path / "train/1979.zarr"
    shutil.copytree(stores["plain 3"] / "train", tmp_path / "train")
    group = zarr.open_group(store, mode="r+")
    fields = group["fields"][:]
    group["fields"][5, 2, 1, 1] = np.nan
    with refusal(r"1979.zarr: frame 5: channel 2 \(t2m\) holds nan"):
        FieldDataset(tmp_path / "train", 20, (16, 32)).check_finite(4)
    del group["fields"]
    group.create_array("fields", data=fields, chunks=(1, 20, 16, 32), shards=(4, 20, 16, 32))
    with refusal("in shards: write it without"):
        FieldDataset(tmp_path / "train", 20, (16, 32))


@pytest.mark.parametrize("chunks", [(4, 20, 16, 32), (1, 1, 16, 32)])
def test_other_chunks_are_read_too(sample_folder, tmp_path, chunks):
    for path in (sample_folder / "train").glob("*.h5"):
        with h5py.File(path, locking=False) as file:
            group = zarr.open_group(tmp_path / "train" / f"{path.stem}.zarr", mode="w")
            group.create_array("fields", data=file["fields"][:], chunks=chunks)
    ours, theirs = (FieldDataset(folder / "train", 20, (16, 32)) for folder in (tmp_path, sample_folder))
    np.testing.assert_array_equal(read_all(ours), read_all(theirs))


def test_a_conversion_goes_on_where_it_was_interrupted(sample_folder, tmp_path, capsys):
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/1979.zarr.part").mkdir()
    (tmp_path / "data/train/1979.zarr.part/junk").touch()
    zarr_years.main([str(sample_folder), str(tmp_path / "data")])
    assert capsys.readouterr().out.count(".zarr\n") == 4
    zarr_years.main([str(sample_folder), str(tmp_path / "data")])
    assert capsys.readouterr().out == ""
    assert len(FieldDataset(tmp_path / "data/train", 20, (16, 32))) == 38
    with refusal("its folders hold no year files"):
        zarr_years.main([str(tmp_path / "data"), str(tmp_path / "again")])
