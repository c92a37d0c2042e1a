"""Foundations of all other packages: processes, mesh layout, launch, device, settings, errors, data loaders."""
