"""The subcommands of benchmark.py: what is measured, and how it is shown.

Gives layout_check the layouts of a table of benchmarks. Imports tools.planner and tools.instruments.
"""
