"""Foundations of all other packages: processes, mesh layout, launch, device, settings, errors, data loaders."""

from utils.openmp import limit_spinning

limit_spinning()  # while torch is not loaded yet
