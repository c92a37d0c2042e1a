"""Programs around the ladder: planner, benchmarks, forecasts, preflight checks, and what they measure with."""

import utils  # noqa: F401  # sets how threads wait, before torch is loaded
