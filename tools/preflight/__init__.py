"""Checks of what a run rests on, before it starts."""
