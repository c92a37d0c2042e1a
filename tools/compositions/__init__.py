"""Compositions of options, run on this machine and compared with one device: `python plan.py check --all`.

Gives plan.py its search. Imports tools.layout_check, tools.planner and tools.instruments.
"""
