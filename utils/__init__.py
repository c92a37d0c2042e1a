"""What the scripts rest on: processes, settings, data, training, checkpoints, metrics and what is written of a run."""
