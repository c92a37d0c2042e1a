"""What a model can be trained for: each task has its data, its loss and its validation."""
