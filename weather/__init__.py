"""The data of the application: channels, grid, writing and reading of year files, sample data, conversion of ERA5."""

import utils.signals  # noqa: F401  # Ctrl-C is quiet from here on
