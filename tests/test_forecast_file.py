"""Files of forecasts, written while the forecast is made: equal to those that are written at once."""

from contextlib import closing

import h5py
import numpy as np
import pytest
from xarray.backends import H5NetCDFStore

from tools.forecasting.output_files import LAYOUTS, FileKind, file_name
from weather.fields.grid import Grid, latitudes, longitudes

START = np.datetime64("1982-01-02T06", "s")
LEADS = [6, 12, 18]
NAMES = ["u10", "t2m", "z500", "z850", "u500", "foo"]  # t2m and z500 in other units; no u850
UNITS = ["m s-1", "degC", "gpm", "m2 s-2", "m s-1", "1"]
GRID = Grid(latitudes(8), longitudes(16))
KIND = {layout: FileKind(LEADS, NAMES, UNITS, GRID, {"title": "x"}, layout) for layout in LAYOUTS}
REFERENCES = {"DIMENSION_LIST", "REFERENCE_LIST"}  # of HDF5: places in the file


def forecast(members):
    of_members = (members,) if members else ()
    return np.random.default_rng(0).standard_normal((len(LEADS), *of_members, len(NAMES), 8, 16)).astype("f4")


def content(path):
    """All that a file says: attributes, and of each variable shape, storage, attributes and bytes."""
    found = {}
    with h5py.File(path) as file:
        found["of the file"] = {name: str(value) for name, value in file.attrs.items()}
        for name, data in file.items():
            attributes = {key: str(value) for key, value in data.attrs.items() if key not in REFERENCES}
            for key in ("_Netcdf4Dimid", "_Netcdf4Coordinates"):  # numbers of dimensions, in order of their making
                attributes.pop(key, None)
            found[name] = data.shape, data.dtype, data.chunks, attributes, data[()].tobytes()
    return found


@pytest.mark.parametrize("members", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_by_lead_times_is_the_one_that_is_written_at_once(tmp_path, layout, members):
    kind = KIND[layout]
    fields = forecast(members)
    with closing(H5NetCDFStore.open(tmp_path / "at_once.nc", mode="w")) as store:
        kind.dataset(START, LEADS, fields, GRID).dump_to_store(store)
    with kind.opened(tmp_path, np.array([START]), members) as files:
        for step, of_step in enumerate(fields):
            files[0].write(step, of_step)
    assert content(tmp_path / file_name(START)) == content(tmp_path / "at_once.nc")


def test_room_for_all_lead_times_takes_the_memory_of_one():
    longer = FileKind(range(6, 6001, 6), NAMES, UNITS, GRID, {}, "weatherbench2")
    for field in longer.blank(START, 3).data_vars.values():
        assert field.sizes["prediction_timedelta"] == 1000 and field.variable.values.strides[1] == 0


def test_a_forecast_that_stops_leaves_no_file(tmp_path):
    with pytest.raises(OSError), KIND["cf"].opened(tmp_path, np.array([START]), 0) as files:
        files[0].write(0, forecast(0)[0])
        raise OSError("the disk is full")
    assert not list(tmp_path.iterdir())
