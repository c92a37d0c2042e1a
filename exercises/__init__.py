"""Exercises with a gap to fill, their solutions, and the checks that say what is wrong."""
