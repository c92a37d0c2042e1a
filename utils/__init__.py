"""What everything else stands on: processes, mesh layout, launch, device, settings, errors, data loaders."""
