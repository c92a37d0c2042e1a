"""What the attributes of a source's variables say is heeded: ranges, factors that are text, dates in nanoseconds."""

import h5py
import numpy as np
import pytest
import xarray

from docs.examples.own_region import region
from tests.support.refusals import refusal
from tests.test_prepare_data import prepare, read, save
from weather.fields.attributes import check_stated_range, find_stated_range
from weather.fields.dates import decode_numbers


def with_a_spike(**attributes):
    """A region whose swh is 1000 at one point of the sixth date."""
    data = region()
    swh = data.swh.copy()
    swh[5, 2, 2] = 1000.0
    return data.assign(swh=swh.assign_attrs(attributes))


@pytest.mark.parametrize(
    "attributes",
    [
        {"valid_range": np.array([-50, 30], "f4")},
        {"valid_max": np.float64(30.0)},
    ],
)
def test_values_outside_of_the_range_that_a_file_states_are_refused(tmp_path, attributes):
    name = next(iter(attributes))
    line = f"swh, from 2019-.*: 1 values are outside of {name}, .*30, the first is 1000: .* missing"
    source = save(with_a_spike(**attributes), tmp_path)
    with refusal(line, source):
        prepare(source, tmp_path)


def test_values_at_the_end_of_a_range_are_values():
    variable = xarray.Variable("x", np.zeros(2, "f4"), {"valid_max": 30.0})
    bound = np.float32(30)
    check_stated_range(np.array([np.nextafter(bound, bound + 1)]), variable, "a.nc", "x", "2020-01-01")
    with refusal("1 values are outside of valid_max", "a.nc: x, from 2020-01-01 on"):
        check_stated_range(np.array([bound + np.float32(1e-3)]), variable, "a.nc", "x", "2020-01-01")


def test_a_range_is_of_stored_numbers_or_of_values():
    def stated(dtype, **attributes):
        return find_stated_range(attributes, np.dtype(dtype))

    packed = {"scale_factor": 0.5, "add_offset": 10.0}
    assert stated("i2", valid_range=np.array([0, 100], "i2"), **packed) == (10, 60)
    assert stated("i2", valid_range=np.array([0, 100], "f4"), **packed) == (0, 100)
    assert stated("f4", valid_min=np.float32(-1)) == (-1, np.inf)
    assert stated("i2", valid_range=np.array([0, 100], "i2"), scale_factor=-1.0) == (-100, 0)
    assert stated("i1", valid_max=np.int8(-2), _Unsigned="true", scale_factor=0.5) == (-np.inf, 127)
    assert stated("i1", valid_range=np.array([0, -2], "i1"), _Unsigned="true") == (0, 254)
    nothing = (-np.inf, np.inf)
    assert stated("f4", valid_range="0 to 100") == nothing
    assert stated("f4", valid_range=h5py.Empty("f4")) == nothing
    assert stated("f4") == nothing


def test_a_factor_that_is_text_is_named(tmp_path):
    source = save(region(), tmp_path)
    with h5py.File(source, "a") as file:
        file["swh"].attrs["scale_factor"] = "0.01"
    with refusal("swh: scale_factor is the text '0.01', which is no number: .*ncatted -a scale_factor,swh,o,d", source):
        prepare(source, tmp_path)


@pytest.mark.parametrize("units", ["nanoseconds since 1970-01-01", "ns since 1970-01-01"])
def test_dates_in_nanoseconds_are_read(units):
    dates = np.arange("2020-02-28", "2020-03-02", 6, dtype="datetime64[h]")
    numbers = dates.astype("datetime64[ns]").astype(np.int64)
    found, elapsed = decode_numbers(numbers, units, "standard", "time")
    assert (found == dates).all() and elapsed[1] == 6 * 3600


@pytest.mark.parametrize("calendar", ["standard", "noleap"])
@pytest.mark.parametrize("unit", ["milliseconds", "microseconds"])
def test_small_units_lose_nothing_over_a_year_far_from_their_origin(unit, calendar):
    """A single one of them is less than double precision can tell so far away."""
    seconds = 79 * 365 * 86400 + 21600 * np.arange(1460)
    numbers = seconds * {"milliseconds": 10**3, "microseconds": 10**6}[unit]
    found, elapsed = decode_numbers(numbers, f"{unit} since 1900-01-01", calendar, "time")
    assert (np.diff(elapsed) == 21600).all() and (found.astype("datetime64[h]") == found).all()


def test_a_store_whose_dates_are_in_nanoseconds_is_read(tmp_path):
    pytest.importorskip("zarr", reason="pip install -r requirements/era5.txt")
    data = region()
    encoding = {"time": {"units": "nanoseconds since 1970-01-01", "dtype": "i8"}}
    data.to_zarr(tmp_path / "own.zarr", zarr_format=2, encoding=encoding)
    out = prepare(str(tmp_path / "own.zarr"), tmp_path)
    np.testing.assert_allclose(read(out)[:, 2], data.swh[:32], atol=1e-6)
