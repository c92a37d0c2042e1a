"""Programs around the ladder: planner, benchmarks, forecasts, preflight checks, and what they measure with."""
