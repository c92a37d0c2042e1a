"""Instruments: memory, messages and phases of a training step, counted while it runs, and the ranks that run it.

Gives the other rooms what they measure with. Imports no other room of tools.
"""
