"""Compositions of options, run on this machine and compared with one device: `python plan.py check --all`."""
