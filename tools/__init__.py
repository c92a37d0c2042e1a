"""Programs around the ladder: planner, benchmarks, forecasts, preflight checks, and what they measure with."""

import utils.signals  # noqa: F401  # Ctrl-C is quiet from here on
