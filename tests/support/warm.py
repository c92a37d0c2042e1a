"""Imported last by the server that multiprocessing forks processes from."""

import gc

import torch._inductor.compile_fx  # noqa: F401  what the first compilation of every process would import

from tests.support.pictures import draw_none

draw_none()
gc.freeze()  # what is imported stays memory that the processes share: collecting garbage does not touch it
gc.set_threshold(20_000, 20, 20)
