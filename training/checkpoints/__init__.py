"""Checkpoints: files of weights and states, written whole or not at all, read into any layout.

They give the run a folder of checkpoints, and forecasts their weights. They may import every room but run.
"""
