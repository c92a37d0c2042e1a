"""What a layout needs, before it is run: memory, messages and time of a training step, on one CPU."""
