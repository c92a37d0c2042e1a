"""The application's data: channels, grid, year files and how they are read, sample data, conversion of ERA5."""
