"""The planner: memory, messages and time of a layout's training step, computed on one CPU before it runs.

Gives plan.py, benchmarks and checks their plans. Imports tools.instruments.
"""
