"""The data of the application: channels, grid, writing and reading of year files, sample data, conversion of ERA5."""

import utils  # noqa: F401  # sets how threads wait, before torch is loaded
