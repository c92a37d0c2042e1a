"""The subcommands of benchmark.py: what is measured, and how it is shown."""
