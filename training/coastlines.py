"""Coastlines for maps: those of Natural Earth, where cartopy is installed and has them on this machine already."""

from functools import cache

import numpy as np


@cache
def coastlines() -> list[np.ndarray]:
    """Lines of points, each (N, 2) in degrees east (-180 to 180) and north; none where cartopy or its data are missing.

    Nothing is downloaded: a compute node may have no way out, and would wait for it.
    """
    try:
        from cartopy import config
        from cartopy.io import Downloader, shapereader

        for resolution in ("110m", "50m"):
            what = {"config": config, "resolution": resolution, "category": "physical", "name": "coastline"}
            source = Downloader.from_config(("shapefiles", "natural_earth", resolution, "physical", "coastline"))
            for path in (source.pre_downloaded_path(what), source.target_path(what)):  # source.path would download
                if path and path.is_file():
                    shapes = shapereader.Reader(path).geometries()
                    return [np.array(line.coords) for shape in shapes for line in getattr(shape, "geoms", [shape])]
    except Exception:  # coastlines are an ornament: whatever is wrong with them, the map is drawn
        pass
    return []
