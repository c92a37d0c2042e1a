"""Programs around the ladder: planner, benchmarks, forecasts, preflight checks, and what they measure with."""

import utils.interrupt  # noqa: F401  # Ctrl-C is quiet from here on
