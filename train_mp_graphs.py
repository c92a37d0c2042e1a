"""NERSC's name of a program that is an option here: this file only says so."""

import shlex
import sys

command = shlex.join(["train_mp.py", "--enable_cuda_graphs", *sys.argv[1:]])
print(f"error: train_mp_graphs.py is an option of train_mp.py here: give {command}", file=sys.stderr)
sys.exit(2)
