"""Years in Zarr stores give the samples of year files, are trained to the same weights, and are refused as clearly."""

import os
import re
import shutil
from contextlib import closing

import h5py
import numpy as np
import pytest
import xarray

from docs.examples import zarr_years
from tests.support import programs
from tests.support.launch import losses
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from tests.test_data_loader import CPU, read_all
from tests.test_data_loader_dali import assert_same_batches, needs_dali
from training.tasks import build_task
from weather import year_files
from weather.years.dataset import FieldDataset

zarr = pytest.importorskip("zarr", reason="pip install -r requirements/era5.txt")
numcodecs = pytest.importorskip("numcodecs", reason="pip install -r requirements/era5.txt")
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


@pytest.mark.parametrize(
    "kinds", slow_but([["compressed 3"]], [["compressed 3"], list(STORED)], "plain stores"), ids=len
)
def test_runs_on_stores_have_the_losses_of_year_files_bit_for_bit(stores, tiny_options, tmp_path, kinds):
    """Rungs 1 and 4."""
    shard = ["train_shard.py", "--yaml_config=config/ViT.yaml", "--domain_parallel=1x2"]
    common = {"num_data_workers": 2, "forcings": ["orography", "hour"], "num_iters": 12}
    for name, folder in {"hdf5": None, **{kind: stores[kind] for kind in kinds}}.items():
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


def test_what_is_no_number_is_named(stores, tmp_path):
    shutil.copytree(stores["plain 3"] / "train", tmp_path / "train")
    group = zarr.open_group(tmp_path / "train/1979.zarr", mode="r+")
    group["fields"][5, 2, 1, 1] = np.nan
    with refusal(r"1979.zarr: frame 5: channel 2 \(t2m\) holds nan"):
        FieldDataset(tmp_path / "train", 20, (16, 32)).check_finite(4)


FRAME = (1, 20, 16, 32)
LAYOUTS = {
    "four frames a chunk": {"chunks": (4, 20, 16, 32)},
    "a chunk a channel": {"chunks": (1, 1, 16, 32)},
    "chunks that divide nothing": {"chunks": (3, 7, 5, 9)},
    "the same without compression": {"chunks": (3, 7, 5, 9), "compressors": None},
    "rows of a frame": {"chunks": (1, 20, 5, 32), "compressors": None},
    "gzip": {"chunks": FRAME, "compressors": {"name": "gzip", "configuration": {"level": 1}}},
    "blosc": {"chunks": FRAME, "compressors": zarr.codecs.BloscCodec(cname="lz4")},
    "two codecs": {"chunks": FRAME, "compressors": [zarr.codecs.GzipCodec(), zarr.codecs.ZstdCodec()]},
    "a codec that zarr alone knows": {"chunks": FRAME, "compressors": [zarr.codecs.Crc32cCodec()]},
    "transposed": {"chunks": FRAME, "filters": [zarr.codecs.TransposeCodec(order=(0, 3, 2, 1))]},
    "the other byte order": {"chunks": FRAME, "serializer": zarr.codecs.BytesCodec(endian="big")},
    "in double precision": {"chunks": FRAME, "dtype": "f8"},
    "shards": {"chunks": FRAME, "shards": (8, 20, 16, 32)},
    "shards of channels": {"chunks": (1, 1, 16, 32), "shards": (8, 20, 16, 32), "compressors": None},
    "shards with the index first": {
        "chunks": FRAME,
        "shards": {"shape": (8, 20, 16, 32), "index_location": "start"},
    },
    "transposed in shards": {
        "chunks": FRAME,
        "shards": (8, 20, 16, 32),
        "filters": [zarr.codecs.TransposeCodec(order=(0, 3, 2, 1))],
    },
    "format 2": {"chunks": FRAME, "zarr_format": 2, "fill_value": 0.0},
    "format 2, nested": {
        "chunks": FRAME,
        "zarr_format": 2,
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
        "compressors": numcodecs.Blosc(),
    },
    "format 2, in columns": {"chunks": FRAME, "zarr_format": 2, "order": "F"},
    "format 2, filtered": {"chunks": FRAME, "zarr_format": 2, "filters": [numcodecs.Shuffle(4)]},
}


def write_layout(source, store, dtype="f4", zarr_format=3, **layout):
    """The fields of a year file as a store of this layout; returns its group."""
    with h5py.File(source, locking=False) as file:
        fields = file["fields"][:]
    group = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    group.create_array("fields", data=fields.astype(dtype), **layout)
    return group


QUICK = ["chunks that divide nothing", "transposed in shards", "format 2, nested", "format 2, filtered"]


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "other chunks and codecs"))
def test_chunks_are_read_however_they_lie_and_are_encoded(sample_folder, tmp_path, layout):
    write_layout(sample_folder / "train/1979.h5", tmp_path / "1979.zarr", **LAYOUTS[layout])
    for window in {}, {"rows": slice(3, 9)}, {"rows": slice(1, 7), "columns": slice(5, 30)}:
        ours = FieldDataset(tmp_path / "1979.zarr", 18, (16, 32), **window)
        theirs = FieldDataset(sample_folder / "train", 18, (16, 32), limit=19, **window)
        np.testing.assert_array_equal(read_all(ours), read_all(theirs))


@pytest.mark.parametrize("layout", ["shards", "shards with the index first", "transposed in shards"])
def test_chunks_that_were_never_written_into_a_shard_are_counted(sample_folder, tmp_path, layout):
    source, store = sample_folder / "train/1979.h5", tmp_path / "1979.zarr"
    group = write_layout(source, store, **LAYOUTS[layout])
    with h5py.File(source, locking=False) as file:
        frames = file["fields"][:]
    shape = group["fields"].shape
    group.create_array("fields", shape=shape, dtype="f4", overwrite=True, **LAYOUTS[layout])
    group["fields"][:5] = frames[:5]
    group["fields"][8:20] = frames[8:20]  # the third shard reaches beyond the last frame
    with refusal("1979.zarr: 3 chunks of 'fields' were never written: the store was not finished"):
        FieldDataset(store, 20, (16, 32))
    group["fields"][5:8] = frames[5:8]
    FieldDataset(store, 20, (16, 32))
    (store / "fields/c/1/0/0/0").unlink()
    with refusal("8 chunks of 'fields' were never written"):
        FieldDataset(store, 20, (16, 32))


def test_a_chunk_that_disappears_or_is_cut_off_is_named(stores, tmp_path):
    for stored, chunk in ("plain 2", "fields/7.0.0.0"), ("compressed 3", "fields/c/7/0/0/0"):
        shutil.copytree(stores[stored] / "train", tmp_path / stored)
        dataset, path = FieldDataset(tmp_path / stored, 20, (16, 32)), tmp_path / stored / "1979.zarr" / chunk
        os.truncate(path, 5000)
        with refusal("1979.zarr: frame . cannot be read"):
            read_all(dataset)
        path.unlink()
        with refusal("1979.zarr: chunk 7.0.0.0 of 'fields' was never written"):
            read_all(dataset)


CODECS = {"none": None, "auto": "auto", "gzip": zarr.codecs.GzipCodec(), "blosc": zarr.codecs.BloscCodec()}


@pytest.mark.parametrize("codec", slow_but(["none", "auto"], CODECS, "other codecs"))
def test_a_chunk_of_another_size_is_no_chunk(sample_folder, tmp_path, codec):
    """A codec fills the first part of a buffer without a word."""
    store = tmp_path / "1979.zarr"
    write_layout(sample_folder / "train/1979.h5", store, chunks=FRAME, compressors=CODECS[codec])
    small = zarr.open_group(tmp_path / "small", mode="w").create_array(
        "fields", data=np.ones((1, 20, 16, 16), "f4"), chunks=(1, 20, 16, 16), compressors=CODECS[codec]
    )
    assert small.nchunks == 1
    shutil.copy(tmp_path / "small/fields/c/0/0/0/0", store / "fields/c/7/0/0/0")
    with refusal("1979.zarr: frame . cannot be read"):
        read_all(FieldDataset(store, 20, (16, 32)))


def test_names_in_bytes_and_whole_numbers_of_time_are_read(sample_folder, tmp_path):
    group = write_layout(
        sample_folder / "train/1979.h5", tmp_path / "some.zarr", chunks=FRAME, zarr_format=2, fill_value=0.0
    )
    theirs = FieldDataset(sample_folder / "train", 20, (16, 32))
    names = np.array(theirs.description.names, "S5")
    group.create_array("channel", data=names, fill_value=b"")
    hours = (np.datetime64("1979-01-01") - np.datetime64("1900-01-01")).astype("timedelta64[h]").astype(int)
    time = group.create_array("time", data=(hours + 6 * np.arange(20)).astype("i4"), fill_value=0)
    time.attrs["units"] = "hours since 1900-01-01"
    group.create_array("latitude", data=theirs.description.grid.latitude, fill_value=0.0)
    group.create_array("longitude", data=theirs.description.grid.longitude, fill_value=0.0)
    ours = FieldDataset(tmp_path / "some.zarr", 20, (16, 32))
    assert not ours.description.difference(theirs.description)
    np.testing.assert_array_equal(ours.times[0], theirs.times[0])


@pytest.mark.parametrize("name", ["valid_time", "when"])
def test_years_of_a_store_are_told_by_its_dates_whatever_their_name(sample_folder, tmp_path, name):
    group = write_layout(sample_folder / "train/1979.h5", tmp_path / "all.zarr", chunks=FRAME)
    days = np.datetime64("1979-12-30") - np.datetime64("1970-01-01")
    time = group.create_array(name, data=24 * days.astype(int) + 6 * np.arange(20))
    time.attrs["units"] = "hours since 1970-01-01"
    ours = FieldDataset(f"{tmp_path}/all.zarr#1979,1980", 20, (16, 32))
    assert [len(dates) for dates in ours.times] == [8, 12] and ours.times[1][0] == np.datetime64("1980-01-01")


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
