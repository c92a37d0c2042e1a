"""Year files of others: coordinates and channels are read by what the file says of them, or refused in words."""

import re
from contextlib import closing

import h5py
import numpy as np
import pytest

from tests.support.refusals import refusal
from weather.fields.channels import channel_of, split_units
from weather.years.dataset import FieldDataset
from weather.years.year_reader import open_year

CHANNELS, H, W, FRAMES = ("u10", "t2m"), 12, 24, 6
NORTHERN = np.linspace(50, 20, H)  # a region, which no default gives
EASTERN = np.linspace(0, 40, W)
REGION = {"latitude": NORTHERN, "longitude": EASTERN}


def write(folder, name="1979.h5", fields=True, **arrays):
    """A year file. arrays: {name: values, or (values, attributes)}."""
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / name, "w") as file:
        if fields:
            shape = (FRAMES, len(CHANNELS), H, W)
            file["fields"] = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        for key, given in ({"channel": list(CHANNELS)} | arrays).items():
            values, attributes = given if isinstance(given, tuple) else (given, {})
            if values is None:
                continue
            file[key] = values
            if attributes:
                file[key].attrs.update(attributes)
    return folder


def described(folder):
    with closing(FieldDataset(folder, len(CHANNELS), (H, W))) as years:
        return years.description, years.notes()


def mesh(rows, columns):
    """A coordinate of each point, (H, W): the sum of one of each row and one of each column."""
    return rows[:, None] + columns


NONE = np.zeros(W)
COORDINATES = {
    "capitals": {"Latitude": NORTHERN, "LONGITUDE": EASTERN},
    "short names": {"LAT": NORTHERN, "Lon": EASTERN},
    "units": {"north": (NORTHERN, {"units": "degree_north"}), "east": (EASTERN, {"units": "degreesE"})},
    "units in bytes": {
        "a": (NORTHERN, {"units": b"degrees_N"}),
        "b": (EASTERN, {"units": np.array([b"degrees_east"])}),
    },
    "standard names": {
        "a": (NORTHERN, {"standard_name": "latitude"}),
        "b": (EASTERN, {"standard_name": "longitude"}),
    },
    "beside their bounds": {
        "lat_bnds": (np.stack([NORTHERN, NORTHERN], 1), {"units": "degrees_north"}),
        "north": (NORTHERN, {"units": "degrees_north"}),
        "lon": EASTERN,
    },
    "beside another of the name": {"latitude": 45.0, "lat": NORTHERN, "lon": EASTERN},
    "a regular mesh": {"nav_lat": mesh(NORTHERN, NONE), "nav_lon": mesh(np.zeros(H), EASTERN)},
    "a regular mesh by attributes": {
        "a": (mesh(NORTHERN, NONE), {"units": "degrees_north"}),
        "b": (mesh(np.zeros(H), EASTERN), {"units": "degrees_east"}),
    },
}


@pytest.mark.parametrize("stored", COORDINATES)
def test_coordinates_are_found_by_name_or_attributes(tmp_path, stored):
    description, notes = described(write(tmp_path / "years", **COORDINATES[stored]))
    np.testing.assert_array_equal(description.grid.latitude, NORTHERN)
    np.testing.assert_array_equal(description.grid.longitude, EASTERN)
    assert not [note for note in notes if "tude" in note]


def test_coordinates_that_are_assumed_are_named(tmp_path):
    description, notes = described(write(tmp_path / "years"))
    assert description.grid.latitude[0] == 90
    assert (
        f"{tmp_path / 'years'}: has no latitude: rows are taken to run from the north pole to the south pole" in notes
    )
    assert any("has no longitude: columns are taken to run around the globe" in note for note in notes)


NO_COORDINATES = {
    "radians": (np.deg2rad(NORTHERN), "'latitude' is 0.3491 to 0.8727: in radians?"),
    "radians as units": ((np.full(H, 1) + np.arange(H), {"units": "radian"}), "in radians?"),
    "zeros": (np.zeros(H), "'latitude' is 0 in every row: was it never written?"),
    "half of it": (np.where(np.arange(H) < 6, NORTHERN, 0), "'latitude' is 0 in rows 6 and 7: was it written to the e"),
    "halves swapped": (np.roll(NORTHERN, 6), "'latitude' turns back from 20 in row 5 to 50"),
    "a mesh that is not regular": (
        mesh(NORTHERN, np.arange(W) / 10),
        "(12, 24) is not the same along a row: regrid it",
    ),
    "packed": ((np.arange(H), {"scale_factor": 0.5}), "'latitude' is packed as int64 (scale_factor 0.5)"),
    "a rotated grid": ((NORTHERN, {"standard_name": "grid_latitude"}), "of a rotated or projected grid, no latitude"),
}


@pytest.mark.parametrize("fault", NO_COORDINATES)
def test_latitudes_that_are_none_are_refused(tmp_path, fault):
    stored, line = NO_COORDINATES[fault]
    write(tmp_path / "years", latitude=stored, longitude=EASTERN)
    with refusal(re.escape(line), tmp_path / "years/1979.h5"):
        described(tmp_path / "years")


def test_a_small_region_at_the_equator_is_in_degrees_where_it_says_so(tmp_path):
    near = np.linspace(-1, 1, H)
    folder = write(tmp_path / "years", latitude=(near, {"units": "degrees_north"}), longitude=EASTERN)
    np.testing.assert_array_equal(described(folder)[0].grid.latitude, near)


def test_longitudes_are_distinct(tmp_path):
    across = np.concatenate([np.arange(170, 180, 10 / 12), np.arange(-180, -170, 10 / 12)])[:W]
    folder = write(tmp_path / "years", latitude=NORTHERN, longitude=across)
    np.testing.assert_array_equal(described(folder)[0].grid.longitude, across)
    write(tmp_path / "none", longitude=np.zeros(W))
    with refusal("'longitude' is 0 in every column: was it never written?"):
        described(tmp_path / "none")
    write(tmp_path / "twice", longitude=np.arange(W) % 12)
    with refusal("'longitude' is 0 in columns 0 and 12: keep one of them"):
        described(tmp_path / "twice")


@pytest.mark.parametrize(
    "arrays",
    [
        {"rlat": NORTHERN, "rlon": EASTERN},
        {"y": (NORTHERN, {"standard_name": "grid_latitude", "units": "degrees"})},
        {"y": (NORTHERN, {"standard_name": "projection_y_coordinate", "units": "m"})},
    ],
    ids=str,
)
def test_a_grid_of_another_kind_is_not_taken_for_a_globe(tmp_path, arrays):
    write(tmp_path / "years", **arrays)
    with refusal("is of a rotated or projected grid, no latitude: regrid it to latitudes and longitudes"):
        described(tmp_path / "years")


def test_dimensions_in_another_order_are_refused_in_hdf5(tmp_path):
    write(tmp_path / "labels", **REGION)
    wrong = re.escape("1979.h5: 'fields' has the dimensions (time, channel, Lon, lat): write it as (time, channel, lat")
    with h5py.File(tmp_path / "labels/1979.h5", "a") as file:
        for dimension, label in zip(file["fields"].dims, ("time", "channel", "Lon", "lat"), strict=True):
            dimension.label = label
    with refusal(wrong):
        described(tmp_path / "labels")

    write(tmp_path / "scales", time=(np.arange(FRAMES), {"units": "hours since 1979-01-01"}), **REGION)
    with h5py.File(tmp_path / "scales/1979.h5", "a") as file:
        # Scales of the wrong length are attached by those who mix up their axes, too.
        for number, name in enumerate(("time", "channel", "longitude", "latitude")):
            file[name].make_scale(name)
            file["fields"].dims[number].attach_scale(file[name])
    with refusal(re.escape("'fields' has the dimensions (time, channel, longitude, latitude)")):
        described(tmp_path / "scales")


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_dimensions_in_another_order_are_refused_in_zarr(tmp_path, zarr_format):
    zarr = pytest.importorskip("zarr", reason="pip install -r requirements/era5.txt")
    for names in (("time", "channel", "lat", "lon"), ("time", "level", "row", "column"), ("time", "channel", "x", "y")):
        group = zarr.open_group(tmp_path / "1979.zarr", mode="w", zarr_format=zarr_format)
        own = {"dimension_names": names} if zarr_format == 3 else {"attributes": {"_ARRAY_DIMENSIONS": names}}
        fields = np.ones((FRAMES, len(CHANNELS), H, W), np.float32)
        group.create_array("fields", data=fields, **own)
        if "x" not in names:
            open_year(tmp_path / "1979.zarr").close()
            continue
        with refusal(re.escape("'fields' has the dimensions (time, channel, x, y): write it as (time, channel, latit")):
            open_year(tmp_path / "1979.zarr")


# ---- files


def test_years_have_the_suffixes_that_others_give_them(tmp_path):
    for number, suffix in enumerate(("h5", "H5", "hdf5", "nc", "nc4", "NC")):
        write(tmp_path / "years", f"{1979 + number}.{suffix}", **REGION)
    with closing(FieldDataset(tmp_path / "years", len(CHANNELS), (H, W))) as years:
        assert len(years.paths) == 6
    write(tmp_path / "years", "1979.hdf5")
    with refusal("holds 1979.h5 and 1979.hdf5: the same year twice"):
        FieldDataset(tmp_path / "years", len(CHANNELS), (H, W))


def test_without_fields_the_message_lists_what_may_be_meant(tmp_path):
    data = np.zeros((FRAMES, 2, H, W), np.float32)
    write(tmp_path / "years", fields=False, data=data, **REGION)
    with refusal(re.escape(f"it has none, it holds data {data.shape}: rename it to 'fields'"), tmp_path):
        open_year(tmp_path / "years/1979.h5")


# ---- channels


CHANNEL_NAMES = {
    "blanks of Fortran": (["u10     ", "t2m     "], ["u10", "t2m"], ["m s-1", "K"]),
    "units in brackets": (["u10 [m s-1]", "t2m (degC)"], ["u10", "t2m"], ["m s-1", "degC"]),
    "levels in Pa": (["z50000", "U_85000"], ["z500", "u850"], ["m2 s-2", "m s-1"]),
    "a name of nobody": ([" ozone ", "t2m"], ["ozone", "t2m"], ["", "K"]),
    "numbers": (np.arange(2), ["u10", "v10"], ["m s-1", "m s-1"]),
}


@pytest.mark.parametrize("stored", CHANNEL_NAMES)
def test_names_of_channels_are_read_as_they_are_meant(tmp_path, stored):
    theirs, names, units = CHANNEL_NAMES[stored]
    description, notes = described(write(tmp_path / "years", channel=theirs))
    assert (description.names, description.units) == (names, units)
    are_assumed = any("names no channels: they are taken for u10, v10" in note for note in notes)
    assert are_assumed == (stored == "numbers")


def test_a_level_in_brackets_is_no_unit():
    assert split_units("u (850 hPa)") == ("u (850 hPa)", "")
    assert channel_of("z12345").name == "z12345"  # no level that anyone has
    assert channel_of("z1000").name == "z1000"


@pytest.mark.parametrize(
    ("theirs", "line"),
    [(["u10", "u10"], "channels 0 and 1 are both 'u10': "), (["msl", "mslp"], "both 'mslp' ('msl' and 'mslp'): ")],
)
def test_two_channels_of_one_name_are_refused(tmp_path, theirs, line):
    write(tmp_path / "years", channel=theirs)
    with refusal(re.escape(line), tmp_path / "years/1979.h5"):
        described(tmp_path / "years")


def test_units_are_compared_by_what_they_mean(tmp_path):
    for number, units in enumerate((["m s-1", "K"], ["m s**-1 ", "kelvin"], ["m/s", "k"], ["", ""])):
        write(tmp_path / "years", f"19{79 + number}.h5", channel_units=units)
    assert described(tmp_path / "years")[0].units == ["m s-1", "K"]
    write(tmp_path / "years", "1983.h5", channel_units=["m s-1", "degC"])
    with refusal("the unit of channel 1 is 'degC' and not 'K'", tmp_path / "years/1983.h5"):
        described(tmp_path / "years")


def test_units_that_are_not_known_are_named(tmp_path):
    _, notes = described(write(tmp_path / "years", channel_units=["m s-1", "degF"]))
    assert f"{tmp_path / 'years'}: the unit 'degF' of t2m is not known: its range is not checked" in notes
