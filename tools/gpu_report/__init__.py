"""What a machine's GPUs do with this repository: everything that needs one is run once, and told on a page."""
