"""Years of data as training reads them: HDF5 files and Zarr stores, their samples and forcings.

Gives FieldDataset and open years to whoever trains, checks or scores. Imports weather.sources and weather.fields.
"""
