"""One training step: forward, backward, update, and the options that make it fast or small.

It gives scripts TrainingStep and the optimizer. It may import tasks, forecasting and models.
"""
