"""The planner: memory, messages and time of a layout's training step, computed on one CPU before it runs."""
