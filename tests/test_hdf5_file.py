"""HDF5 files are opened without locks, hold what they promise, and are told from other formats."""

import errno
import fcntl
import gzip
import os
import re
from contextlib import contextmanager

import h5py
import numpy as np
import pytest
import xarray

from tests.support.refusals import refusal
from tools.forecasting.output_files import FileKind
from weather.fields.grid import Grid
from weather.sources.hdf5 import make_hdf5
from weather.years.dataset import FieldDataset
from weather.years.year_reader import open_year, year_paths

LZ4 = 32004  # a filter that no library brings along: netCDF4 has one of Blosc for the whole process

FIELDS = np.random.default_rng(0).standard_normal((8, 2, 4, 8), dtype=np.float32)


def write(path, fields=FIELDS, **options):
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w", **options) as file:
        file["fields"] = fields
    return path


def virtual(path, sources, name="fields", shape=FIELDS.shape):
    """A file whose `fields` are those of other files, one after the other along time."""
    layout = h5py.VirtualLayout(shape, "f4")
    first = 0
    for source in sources:
        layout[first : first + 4] = h5py.VirtualSource(str(source), name, (4, *shape[1:]))
        first += 4
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("fields", layout)
    return path


def halves(folder):
    return [write(folder / f"parts/{number}.h5", FIELDS[4 * number :][:4]) for number in (0, 1)]


def assert_reads(path):
    year = open_year(path)
    out = np.empty_like(FIELDS)
    year.read(0, out, slice(0, 4), slice(0, 8))
    np.testing.assert_array_equal(out, FIELDS)
    year.close()


def test_a_file_has_its_space_on_the_disk_before_values_are_written(tmp_path):
    with make_hdf5(tmp_path / "1979.h5", FIELDS.nbytes) as file:
        assert 512 * (tmp_path / "1979.h5").stat().st_blocks >= FIELDS.nbytes
        file["fields"] = FIELDS
    assert_reads(tmp_path / "1979.h5")
    sizes = [path.stat().st_size for path in (tmp_path / "1979.h5", write(tmp_path / "other/1979.h5"))]
    assert sizes[0] == sizes[1]


def test_a_file_is_made_where_space_cannot_be_reserved(tmp_path, monkeypatch):
    def refuse(descriptor, offset, size):
        assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND  # glibc reserves no space of such a file on NFS
        raise OSError(errno.EINVAL, "not on this file system")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for system in ("one that cannot", "macOS"):
        with make_hdf5(tmp_path / "1979.h5", FIELDS.nbytes) as file:
            file["fields"] = FIELDS
        assert_reads(tmp_path / "1979.h5")
        if system != "macOS":
            monkeypatch.delattr(os, "posix_fallocate")


def test_a_virtual_dataset_whose_sources_are_there_is_read(tmp_path):
    assert_reads(virtual(tmp_path / "1979.h5", halves(tmp_path)))
    relative = [path.relative_to(tmp_path) for path in halves(tmp_path)]
    assert_reads(virtual(tmp_path / "1980.h5", relative))


def test_sources_are_looked_for_beside_the_file_that_a_link_means_and_by_patterns(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    relative = [path.relative_to(tmp_path / "elsewhere") for path in halves(tmp_path / "elsewhere")]
    real = virtual(tmp_path / "elsewhere/1979.h5", relative)
    (tmp_path / "1979.h5").symlink_to(real)
    assert_reads(tmp_path / "1979.h5")
    with h5py.File(tmp_path / "elsewhere/1980.h5", "w") as file:
        unlimited, frame = h5py.h5s.UNLIMITED, FIELDS.shape[1:]
        space = h5py.h5s.create_simple((0, *frame), (unlimited, *frame))
        space.select_hyperslab((0, 0, 0, 0), (unlimited, 1, 1, 1), (4, 1, 1, 1), (4, *frame))
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        pattern = str(tmp_path / "elsewhere/parts/%b.h5").encode()
        properties.set_virtual(space, pattern, b"fields", h5py.h5s.create_simple((4, *frame)))
        whole = h5py.h5s.create_simple((0, *frame), (unlimited, *frame))
        h5py.h5d.create(file.id, b"fields", h5py.h5t.IEEE_F32LE, whole, properties)
    assert_reads(tmp_path / "elsewhere/1980.h5")


def without_source(path):
    first, second = halves(path.parent)
    virtual(path, [first, second])
    second.unlink()
    return rf"its source {second} is not there: HDF5 reads zeros in its place"


def without_dataset(path):
    virtual(path, halves(path.parent), name="field")
    return r"parts/0.h5 has no dataset 'field'"


def not_all_mapped(path):
    virtual(path, halves(path.parent)[:1])
    return "50% of it has no source: HDF5 reads zeros there"


def source_of_a_source(path):
    first, second = halves(path.parent)
    middle = virtual(path.parent / "parts/middle.h5", [first], shape=(4, 2, 4, 8))
    virtual(path, [middle, second])
    first.unlink()
    return rf"made of .*middle.h5 is virtual, and its source {first} is not there"


def source_unfinished(path):
    first, second = halves(path.parent)
    with h5py.File(second, "w") as file:
        file.create_dataset("fields", (4, 2, 4, 8), "f4", chunks=(1, 2, 4, 8))[:3] = FIELDS[4:7]
    virtual(path, [first, second])
    return r"made of .*1.h5: 1 of 4 chunks were never written"


def source_too_short(path):
    first, second = halves(path.parent)
    write(second, FIELDS[4:6])
    virtual(path, [first, second])
    return r"1.h5 has shape \(2, 2, 4, 8\), and 256 values are taken of it: was it not finished\?"


def source_of_itself(path):
    other = path.with_name("other.h5")
    virtual(path, [other, other])
    virtual(other, [path], shape=(4, 2, 4, 8))
    return "its sources lead back to itself"


def external(path, count=FIELDS.size, name=None):
    raw = path.with_suffix(".raw")
    FIELDS.ravel()[:count].tofile(raw)
    with h5py.File(path, "w") as file:
        file.create_dataset("fields", FIELDS.shape, "f4", external=[(str(name or raw), 0, h5py.h5f.UNLIMITED)])
    return raw


def external_gone(path):
    raw = external(path)
    raw.unlink()
    return rf"lies in the file {raw}, which is not there"


def external_elsewhere(path):
    external(path, name="1979.raw")
    return r"lies in the file 1979.raw, which is not there: set HDF5_EXTFILE_PREFIX='\$\{ORIGIN\}' to have it read from"


def external_short(path):
    external(path, 100)
    return "lies in other files, which hold 400 of its 2048 bytes"


def nothing_written(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("fields", FIELDS.shape, "f4")
    return "all of it was never written"


def packed_floats(path):
    write(path)
    with h5py.File(path, "a") as file:
        file["fields"].attrs.update(scale_factor=2.0, add_offset=[1000.0])
    return r"'fields' is packed as float32 \(scale_factor 2, add_offset 1000\): write its values"


def packed_by_words(path):
    write(path)
    with h5py.File(path, "a") as file:
        file["fields"].attrs.update(scale_factor="see the manual")
    return r"'fields' is packed as float32 \(scale_factor see the manual\): write its values"


def packed_integers(path):
    encoding = {"fields": {"dtype": "i2", "scale_factor": 0.01, "add_offset": 0.0}}
    dimensions = ("time", "channel", "lat", "lon")
    xarray.Dataset({"fields": (dimensions, FIELDS)}).to_netcdf(path, engine="h5netcdf", encoding=encoding)
    return r"'fields' is packed as int16 \(scale_factor 0.01\): write its values"


def unknown_filter(path):
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((1, 2, 4, 8))
        properties.set_filter(LZ4, h5py.h5z.FLAG_OPTIONAL, (0,))
        space = h5py.h5s.create_simple(FIELDS.shape)
        fields = h5py.h5d.create(file.id, b"fields", h5py.h5t.IEEE_F32LE, space, properties)
        for frame, values in enumerate(FIELDS):
            fields.write_direct_chunk((frame, 0, 0, 0), values.tobytes(), 0)
    return r"compressed with filter 32004 \(LZ4\), which this HDF5 lacks: .* `pip install hdf5plugin`"


def netcdf3(path):
    xarray.Dataset({"fields": (("t", "c", "y", "x"), FIELDS)}).to_netcdf(path, engine="scipy")
    return "it is NetCDF 3, not HDF5: turn it into NetCDF 4 with `nccopy -k nc4 IN OUT`"


def contents(data, line):
    def make(path):
        path.write_bytes(data)
        return line

    return make


FAULTS = {
    "a virtual dataset without a source": without_source,
    "a virtual dataset without the source's dataset": without_dataset,
    "a virtual dataset that is not all mapped": not_all_mapped,
    "a virtual dataset of a virtual one without a source": source_of_a_source,
    "a virtual dataset of an unfinished one": source_unfinished,
    "a virtual dataset of one that is shorter": source_too_short,
    "a virtual dataset of itself": source_of_itself,
    "raw values that are gone": external_gone,
    "raw values that are not looked for there": external_elsewhere,
    "raw values that are cut off": external_short,
    "nothing was written": nothing_written,
    "packed by words": packed_by_words,
    "packed floats": packed_floats,
    "packed integers": packed_integers,
    "a filter that is not there": unknown_filter,
    "NetCDF 3": netcdf3,
    "nothing": contents(b"", "it is empty: it was not written, or not downloaded to the end"),
    "GRIB": contents(b"GRIB" + bytes(100), "it is GRIB: convert it with `python -m weather.prepare_era5`"),
    "gzip": contents(gzip.compress(b"data"), "it is compressed with gzip: unpack it"),
    "a page": contents(b"<!DOCTYPE html><html>", "it is no data but the answer of a server.*DOCTYPE"),
    "an answer": contents(b'{"type": "permission denied"}', "it is no data but the answer of a server.*denied"),
    "zip": contents(b"PK\x03\x04" + bytes(100), "it is a zip archive: unpack it"),
    "cut off": contents(b"\x89HDF\r\n\x1a\n" + bytes(20), r"HDF5 \(truncated or damaged\?\)"),
}


@pytest.mark.filterwarnings("ignore:saving variable fields")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_without_its_values_is_refused_before_it_is_read(tmp_path, fault):
    path = tmp_path / "1979.h5"
    line = FAULTS[fault](path)
    with refusal(line, path):
        open_year(path)


def test_neutral_packing_user_blocks_and_raw_files_are_read(tmp_path):
    path = write(tmp_path / "1979.h5")
    with h5py.File(path, "a") as file:
        file["fields"].attrs.update(scale_factor=1.0, add_offset=0.0)
    assert_reads(path)
    assert_reads(write(tmp_path / "1980.h5", userblock_size=1024))
    external(tmp_path / "1981.h5")
    assert_reads(tmp_path / "1981.h5")


def test_what_macos_leaves_beside_a_file_is_passed_over(tmp_path):
    write(tmp_path / "1979.h5")
    (tmp_path / "._1979.h5").write_bytes(b"\x00\x05\x16\x07")
    (tmp_path / "._1980.nc").write_bytes(b"\x00\x05\x16\x07")
    assert year_paths(tmp_path) == [tmp_path / "1979.h5"]
    assert len(FieldDataset(tmp_path, 2, (4, 8))) == 7


@contextmanager
def locked(path):
    """Somebody else holds the file's lock, as on a file system whose locks do not work."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_files_are_read_without_locks(tmp_path):
    path = write(tmp_path / "1979.h5")
    with locked(path):
        with pytest.raises(OSError, match="lock"):
            h5py.File(path)
        assert_reads(path)


def test_forecasts_are_written_without_locks(tmp_path):
    start, grid = np.datetime64("1981-01-01T00", "s"), Grid(np.array([45.0, -45.0]), np.array([0.0, 180.0]))
    kind = FileKind([6], ["t2m"], ["K"], grid, {}, "cf")
    name = "forecast-1981-01-01T00.nc"
    with locked(tmp_path / f"{name}.part"), kind.opened(tmp_path, np.array([start]), 0) as files:
        files[0].write(0, np.ones((1, 2, 2), "f4"))
    with xarray.open_dataset(tmp_path / name, engine="h5netcdf") as written:
        assert re.fullmatch("CF-.*", written.attrs["Conventions"]) and float(written["t2m"].mean()) == 1
