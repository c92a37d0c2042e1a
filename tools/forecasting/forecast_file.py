"""The file of one forecast, written lead time by lead time while the forecast is made.

So a forecast of many members needs the memory of one lead time, however long it is.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray
from xarray.backends import H5NetCDFStore
from xarray.backends.common import ArrayWriter

from tools.forecasting.output_files import file_name, forecast_dataset, weatherbench2_dataset
from utils.files import whole_file
from weather.fields.grid import Grid
from weather.sources.hdf5 import ROOM_BESIDE_VALUES, WITHOUT_LOCKS, reserve

# Each layout has a name of its own for it.
LEAD_TIME = {"cf": "lead_time", "weatherbench2": "prediction_timedelta"}  # the dimension, by layout
FIELD_AXES = 4  # of a field at least: start date, lead time, latitude, longitude


class FileKind:
    """What the files of several forecasts have in common.

    leads: (L,) hours. names, units: of the C channels. attributes: of every file. layout: of output_files.LAYOUTS.
    """

    def __init__(
        self,
        leads: Sequence[int],
        names: Sequence[str],
        units: Sequence[str],
        grid: Grid,
        attributes: dict[str, str],
        layout: str,
    ):
        self.leads = leads
        self.names = names
        self.units = units
        self.grid = grid
        self.attributes = attributes
        self.layout = layout

    def dataset(
        self,
        start: np.datetime64,
        leads: Sequence[int],
        fields: np.ndarray,
        grid: Grid,
    ) -> xarray.Dataset:
        """The forecast from a date at some lead times, in the layout of the files. fields: as of forecast_dataset."""
        # The other layout is made of this one, so that both hold the same numbers.
        forecast = forecast_dataset(start, leads, fields, self.names, self.units, grid, self.attributes)
        return weatherbench2_dataset(forecast) if self.layout == "weatherbench2" else forecast

    def blank(self, start: np.datetime64, members: int) -> xarray.Dataset:
        """A forecast from a date at all lead times, of zeros that take the memory of one lead time.

        members: 0 for a single forecast, without the dimension `number`.
        """
        channels = (members, len(self.names)) if members else (len(self.names),)
        image = [len(axis) for axis in self.grid]
        one_lead_time = np.zeros((1, *channels, *image), np.float32)
        # At a single lead time there is everything else: coordinates, attributes, storage.
        one = self.dataset(start, self.leads[:1], one_lead_time, self.grid)
        # At a single point there are the coordinates of all lead times.
        point = Grid(self.grid.latitude[:1], self.grid.longitude[:1])
        one_point = np.zeros((len(self.leads), *channels, 1, 1), np.float32)
        timed = self.dataset(start, self.leads, one_point, point)

        lead = LEAD_TIME[self.layout]
        # The whole is put together of both; a field of zeros is repeated, not stored.
        variables = {}
        for name, variable in one.variables.items():
            variables[name] = variable
            if lead in variable.dims and name in one.coords:
                variables[name] = timed.variables[name]
            elif lead in variable.dims:
                sizes = {**variable.sizes, lead: len(self.leads)}
                values = np.broadcast_to(variable.values, tuple(sizes.values()))
                variables[name] = xarray.Variable(variable.dims, values, variable.attrs, variable.encoding)
        return xarray.Dataset(variables, attrs=one.attrs).set_coords(list(one.coords))

    @contextmanager
    def opened(self, folder: Path | str, starts: np.ndarray, members: int) -> Iterator[list["ForecastFile"]]:
        """The files of forecasts from some dates, named by them. They get their names when the block ends well.

        Raises OSError, naming the file.
        """
        with ExitStack() as stack:
            files = []
            for start in starts:
                # A forecast that is interrupted leaves no file that looks complete.
                part = stack.enter_context(whole_file(Path(folder) / file_name(start)))
                blank = self.blank(start, members)
                reserve(part, blank.nbytes + ROOM_BESIDE_VALUES)
                store = stack.enter_context(closing(H5NetCDFStore.open(part, mode="w", driver_kwds=WITHOUT_LOCKS)))
                reserve(part, blank.nbytes)  # HDF5 has emptied it
                blank.dump_to_store(store, writer=WithoutFields())
                files.append(ForecastFile(self, start, store))
            yield files


class WithoutFields(ArrayWriter):
    """Writes coordinates, and leaves the space of fields as it is."""

    __slots__ = ()

    def add(self, source: Any, target: Any, region: Any = None) -> None:
        """Write what is no field."""
        if source.ndim < FIELD_AXES:
            super().add(source, target, region)


class ForecastFile:
    """A file that is open, with room for the fields of all lead times."""

    def __init__(self, kind: FileKind, start: np.datetime64, store: H5NetCDFStore):
        self.kind = kind
        self.start = start
        self.store = store

    def write(self, step: int, fields: np.ndarray) -> None:
        """Write the fields of a step of the forecast, counted from 0: (C, H, W), or (M, C, H, W) of members."""
        kind = self.kind
        # The same way as the blank was made, so that units and order of dimensions agree.
        one = kind.dataset(self.start, [kind.leads[step]], fields[None], kind.grid)
        for name, field in one.data_vars.items():
            # The first axes are start date and lead time.
            self.store.ds[name][:, step : step + 1] = field.values
        # Nothing of this lead time stays in memory.
        self.store.sync()
