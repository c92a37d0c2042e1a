"""Data of any origin and format (Zarr, NetCDF, GRIB, HDF5, here or remote), read as frames on one grid.

Gives sources to the converters, and open files and stores to weather.years. Imports weather.fields.
"""
