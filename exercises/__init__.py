"""Exercises with a gap to fill, their solutions, and the checks that say what is wrong."""

import utils.signals  # noqa: F401  # Ctrl-C is quiet from here on
