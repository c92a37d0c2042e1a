"""Instruments: memory, messages and phases of a training step, counted while it runs."""
