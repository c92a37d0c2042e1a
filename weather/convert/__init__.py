"""Writes data sets: the files of each split, their statistics, the config of a user's own data.

Gives writers to the commands prepare_era5, prepare_data, sample_data and year_files. Imports weather.checks and below.
"""
