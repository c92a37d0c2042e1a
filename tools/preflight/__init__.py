"""Checks of everything that a run depends on, before it starts."""
