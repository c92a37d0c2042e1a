"""Imported last by the server that multiprocessing forks processes from."""

import gc

from tests.support.pictures import draw_none

draw_none()
gc.freeze()  # what is imported stays memory that the processes share: collecting garbage does not touch it
