"""The data of the application: channels, grid, writing and reading of year files, sample data, conversion of ERA5."""
