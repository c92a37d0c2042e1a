"""Coastlines are drawn where cartopy and its data are here; nothing is fetched, and without them maps are as before."""

import sys

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from training.forecasting.pictures import coastlines, draw_map
from weather.fields.grid import Grid, latitudes, longitudes

LINES = [[[0.0, 50.0], [10.0, 55.0], [20.0, 50.0]], [[-70.0, -10.0], [-80.0, -20.0]]]


@pytest.fixture
def data_folder(monkeypatch, tmp_path):
    """The one folder in which cartopy looks for data; any attempt to download fails the test."""
    cartopy = pytest.importorskip("cartopy", reason="pip install -r requirements/maps.txt")
    from cartopy.io import Downloader, shapereader

    asked = []
    for place in (Downloader, shapereader.NEShpDownloader):
        monkeypatch.setattr(place, "acquire_resource", lambda *_: asked.append("download"))
    for name in ("pre_existing_data_dir", "data_dir"):
        monkeypatch.setitem(cartopy.config, name, tmp_path / name)
    coastlines.cache_clear()
    yield tmp_path / "pre_existing_data_dir/shapefiles/natural_earth/physical"
    coastlines.cache_clear()
    assert not asked


def drawn():
    axes = Figure().subplots()
    draw_map(axes, np.zeros((16, 32)), Grid(latitudes(16), longitudes(32)), {})
    (lines,) = (part for part in axes.collections if isinstance(part, LineCollection))
    return [line.tolist() for line in lines.get_segments()], axes.get_xlim(), axes.get_ylim()


def test_the_lines_that_are_here_are_drawn_over_the_map(data_folder):
    import shapefile

    data_folder.mkdir(parents=True)
    with shapefile.Writer(data_folder / "ne_110m_coastline.shp", shapefile.POLYLINE) as file:
        file.field("name")
        for line in LINES:
            file.line([line])
            file.record("a")
    lines, x, y = drawn()
    assert LINES[0] in lines and [[290.0, -10.0], [280.0, -20.0]] in lines  # 70 degrees west is 290 degrees east
    assert x == (-5.625, 354.375) and y == (-84.375, 95.625)


@pytest.mark.parametrize("content", [None, b"", b"no shapes"])
def test_missing_and_damaged_data_leave_the_map_as_it_was(data_folder, content):
    if content is not None:
        data_folder.mkdir(parents=True)
        (data_folder / "ne_110m_coastline.shp").write_bytes(content)
    assert drawn() == ([], (-5.625, 354.375), (-84.375, 95.625))


def test_without_cartopy_there_are_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "cartopy", None)
    coastlines.cache_clear()
    assert coastlines() == []
    coastlines.cache_clear()
