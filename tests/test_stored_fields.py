"""Fields and attributes as other programs write them, and copies of a year."""

import h5py
import numpy as np
import pytest

from tests.support.refusals import refusal
from tests.test_time_axis import FRAMES, HOURLY, SHAPE, N, dataset, write


def read_first(years):
    sample = np.empty(years.shape, np.float32)
    years.read(0, sample)
    return sample


def test_fields_in_bfloat16_are_what_they_hold(tmp_path):
    """h5py names both types float32; the numbers of one have two bytes."""
    values = np.random.default_rng(0).standard_normal((FRAMES, *SHAPE), dtype=np.float32)
    values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)  # of those that bfloat16 has
    bfloat16 = h5py.h5t.IEEE_F32LE.copy()
    bfloat16.set_fields(15, 7, 8, 0, 7)
    bfloat16.set_size(2)
    bfloat16.set_ebias(127)
    with h5py.File(tmp_path / "1979.h5", "w") as file:
        space = h5py.h5s.create_simple(values.shape)
        fields = h5py.h5d.create(file.id, b"fields", bfloat16, space)
        fields.write(h5py.h5s.ALL, h5py.h5s.ALL, values, h5py.h5t.IEEE_F32LE)
        file["time"] = 6 * N
        file["time"].attrs["units"] = HOURLY
        file["behind"] = np.zeros(values.shape, np.float32)  # which would be read as fields
    np.testing.assert_array_equal(read_first(dataset(tmp_path)), values[:2])


@pytest.mark.parametrize("name", ["_FillValue", "missing_value", "scale_factor", "add_offset", "units"])
def test_an_attribute_without_a_value_is_none(tmp_path, name):
    write(tmp_path, time=(6 * N, {"units": HOURLY, "calendar": h5py.Empty("S1")}))
    with h5py.File(tmp_path / "1979.h5", "a") as file:
        file["fields"].attrs[name] = h5py.Empty("f4")
        truth = file["fields"][:2]
    years = dataset(tmp_path)
    np.testing.assert_array_equal(read_first(years), truth)
    assert years.times[0][1] == np.datetime64("1979-01-01T06")


def test_a_copy_of_a_year_is_refused_and_a_member_is_not(tmp_path):
    time = (6 * N, {"units": HOURLY})
    write(tmp_path / "members", time=time)
    write(tmp_path / "members", name="1979-member.h5", time=time)
    with refusal("1979.h5: holds the frames of .*1979-member.h5 once more: move one of them away"):
        dataset(tmp_path / "members")
    with h5py.File(tmp_path / "members/1979-member.h5", "a") as file:
        file["fields"][0] += 1
    assert len(dataset(tmp_path / "members")) == 2 * (FRAMES - 1)
