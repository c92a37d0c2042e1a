"""Is a layout right? Compare it with one device, and name the cause of a difference.

Gives plan.py `check`, and compositions their judge. Imports tools.benchmarks, tools.planner and tools.instruments.
"""
