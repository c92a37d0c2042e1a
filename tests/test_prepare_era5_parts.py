"""What was never written, or has no filter here, is found before anything is converted."""

import os

import h5py
import numpy as np
import pytest

from tests.support.era5_examples import FRAMES, build, convert, save_netcdf, save_zarr
from tests.support.refusals import refusal

LZ4 = 32004  # a filter that no library brings along: netCDF4 has one of Blosc for the whole process

fsspec = pytest.importorskip("fsspec")


def save_chunked(data, path, version, chunks, **encoding):
    """A Zarr store whose fields are cut along time and longitude."""
    encodings = {}
    for name in data.data_vars:
        shape = data[name].shape
        encodings[name] = {"chunks": (chunks[0], *shape[1:-1], chunks[1]), **encoding}
    data.to_zarr(path, zarr_format=version, consolidated=version == 2, encoding=encodings)
    return path


@pytest.mark.parametrize("version, chunk", [(2, "u10/3.0.1"), (3, "u10/c/3/0/1")])
@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_a_chunk_of_a_store_that_was_never_written_is_refused(tmp_path, version, chunk, fill):
    fill_value = {"_FillValue": fill} if version == 2 else {"fill_value": fill}
    store = save_chunked(build(), tmp_path / "a.zarr", version, (4, 8), **fill_value)
    (store / chunk).unlink()
    with refusal("a.zarr: 1 chunks of u10 were never written: the store was not finished"):
        convert([store], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["end", "start"])
def test_a_chunk_that_is_missing_inside_a_shard_is_refused(tmp_path, place):
    zarr = pytest.importorskip("zarr")
    data = build()
    data["u10"][4:6, :, :8] = 0  # zarr writes no chunk of the fill value
    save_zarr(data.drop_vars("u10"), tmp_path / "a.zarr", "v3")
    group = zarr.open_group(tmp_path / "a.zarr", mode="r+")
    shards = {"shape": (8, 9, 16), "index_location": place}
    array = group.create_array(
        "u10", shape=data.u10.shape, dtype="f4", chunks=(2, 9, 8), shards=shards, dimension_names=data.u10.dims
    )
    array[:] = data.u10.values
    with refusal("a.zarr: 1 chunks of u10 were never written"):
        convert([tmp_path / "a.zarr"], tmp_path / "out")

    array[4:6, :, :8] = 1e-3
    convert([tmp_path / "a.zarr"], tmp_path / "out")


def test_chunks_beyond_the_years_may_be_missing(tmp_path):
    store = save_chunked(build(), tmp_path / "a.zarr", 2, (FRAMES, 16))
    (store / "u10" / "3.0.0").unlink()  # the test year
    convert([store], tmp_path / "out", test_years=())


def test_a_chunk_that_a_remote_store_lacks_is_refused_when_it_is_read(tmp_path):
    store = save_chunked(build(), tmp_path / "a.zarr", 2, (FRAMES, 8), _FillValue=None)
    (store / "v" / "1.0.0.1").unlink()
    remote = f"{tmp_path.name}.zarr"
    fsspec.filesystem("memory").put(str(store), f"/{remote}", recursive=True)
    with refusal(f"memory://{remote}: chunk 1.0.0.1 of 'v' was never written"):
        convert([f"memory://{remote}"], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.h5")) == ["1979.h5"]


def test_a_remote_store_is_read(tmp_path):
    remote = f"{tmp_path.name}.zarr"
    fsspec.filesystem("memory").put(save_zarr(build(), tmp_path / "a.zarr"), f"/{remote}", recursive=True)
    assert convert([f"memory://{remote}"], tmp_path / "out") == 4


# ---- HDF5


def replace(file, name, make):
    """Put another dataset in the place of a variable of NetCDF; make(values) returns it."""
    values, units = file[name][:], file[name].attrs["units"]
    del file[name]
    dataset = make(values)
    dataset.attrs["units"] = units
    for axis, scale in enumerate(("valid_time", "latitude", "longitude")):
        dataset.dims[axis].attach_scale(file[scale])


def half_written(folder, file):
    def make(values):
        dataset = file.create_dataset("t2m", values.shape, "f4", chunks=(4, *values.shape[1:]))
        dataset[:8] = values[:8]
        return dataset

    replace(file, "t2m", make)


def never_written(folder, file):
    replace(file, "t2m", lambda values: file.create_dataset("t2m", values.shape, "f4"))


def virtual(folder, file, parts=2):
    def make(values):
        layout = h5py.VirtualLayout(values.shape, "f4")
        half = len(values) // 2
        for part in range(parts):
            rows = slice(part * half, (part + 1) * half)
            with h5py.File(folder / f"part{part}.h5", "w") as other:
                other["t2m"] = values[rows]
            layout[rows] = h5py.VirtualSource(f"part{part}.h5", "t2m", (half, *values.shape[1:]))
        return file.create_virtual_dataset("t2m", layout)

    replace(file, "t2m", make)


def virtual_source_gone(folder, file):
    virtual(folder, file)
    (folder / "part1.h5").unlink()


def compressed_with_lz4(folder, file):
    def make(values):
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((1, *values.shape[1:]))
        properties.set_filter(LZ4, h5py.h5z.FLAG_OPTIONAL, (0,))
        space = h5py.h5s.create_simple(values.shape)
        h5py.h5d.create(file.id, b"t2m", h5py.h5t.IEEE_F32LE, space, properties)
        for frame, field in enumerate(values):
            file["t2m"].id.write_direct_chunk((frame, 0, 0), field.tobytes(), 0)
        return file["t2m"]

    replace(file, "t2m", make)


SPOILED = {
    "some chunks": (half_written, "t2m: 6 of 8 chunks were never written"),
    "all of it": (never_written, "t2m: all of it was never written"),
    "a virtual part": (virtual_source_gone, "t2m is virtual, and its source part1.h5 is not there"),
    "an unmapped part": (lambda *args: virtual(*args, parts=1), "t2m is virtual, and 50% of it has no source"),
    "a filter": (compressed_with_lz4, r"t2m is compressed with filter 32004 \(LZ4\).*pip install hdf5plugin"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_parts_that_hdf5_would_read_as_zeros_are_refused(tmp_path, case):
    spoil, message = SPOILED[case]
    source = save_netcdf(build(), tmp_path / "a.nc")
    with h5py.File(source, "r+") as file:
        spoil(tmp_path, file)
    with refusal(f"a.nc: {message}"):
        convert([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_virtual_file_whose_parts_are_there_is_read(tmp_path):
    source = save_netcdf(build(), tmp_path / "a.nc")
    with h5py.File(source, "r+") as file:
        virtual(tmp_path, file)
    assert convert([source], tmp_path / "out") == 4


# ---- year files that are there already


def test_a_year_file_that_cannot_be_read_is_not_called_other_data(tmp_path):
    source = save_netcdf(build(), tmp_path / "a.nc")
    convert([source], tmp_path / "out")
    path = tmp_path / "out" / "train" / "1980.h5"
    os.truncate(path, path.stat().st_size - 1000)
    with refusal("1980.h5: cannot be read: .*truncated file.*: move it away, and it is made again"):
        convert([source], tmp_path / "out")


def test_no_message_advises_to_remove_data(tmp_path):
    source = save_netcdf(build(), tmp_path / "a.nc")
    convert([source], tmp_path / "out")
    with refusal("is other data, or of other settings: choose another folder$"):
        convert([source], tmp_path / "out", coarsen=2)


def test_a_chunk_that_one_of_two_sources_lacks_is_read_from_the_other(tmp_path):
    data = build()
    store = save_chunked(data, tmp_path / "a.zarr", 2, (FRAMES, 16), _FillValue=np.nan)
    (store / "u10" / "3.0.0").unlink()
    other = save_netcdf(data[["u10"]], tmp_path / "b.nc")
    convert([store, other], tmp_path / "out")
    with h5py.File(tmp_path / "out" / "test" / "1982.h5") as file:
        assert np.isfinite(file["fields"]).all()
