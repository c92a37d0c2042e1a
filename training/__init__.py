"""A training run: the step, the tasks, optimizer, validation, checkpoints and the folder of a run."""
