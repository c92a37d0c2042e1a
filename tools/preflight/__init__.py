"""Checks of everything that a run depends on, before it starts.

Gives the command `python -m tools.preflight`. Imports tools.instruments.
"""
