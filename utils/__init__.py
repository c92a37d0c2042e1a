"""What everything else stands on: processes, mesh layout, launch, device, settings, errors, data loaders."""

import utils.signals  # noqa: F401  # Ctrl-C is quiet from here on
