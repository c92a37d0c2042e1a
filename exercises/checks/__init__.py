"""The check of each exercise: what is right is worked out anew, with random sizes and values."""
