"""Run a program to which a signal comes in the midst of a phase: in a call of one of its functions.

    python -m tests.support.interrupted weather.sources.data:SourceData.frames 2 15 weather/prepare_data.py words...

The second call gets signal 15, and then takes an hour, as a compilation or a file system may. `-2`: it goes on at once,
and of several ranks the last one alone gets the signal.
"""

import importlib
import os
import runpy
import sys
import time
from functools import reduce

HOUR = 3600


def interrupt(place, call, number):
    """Plant the signal. call: which one, from 1; negative: the call goes on."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, importlib.import_module(module))
    real = getattr(owner, name)
    is_last_rank = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    if call < 0 and not is_last_rank:
        return
    calls = []

    def interrupted(*args, **options):
        calls.append(None)
        if len(calls) == abs(call):
            os.kill(os.getpid(), number)
            time.sleep(HOUR if call > 0 else 0)
        return real(*args, **options)

    setattr(owner, name, interrupted)


def main():
    place, call, number, *words = sys.argv[1:]
    interrupt(place, int(call), int(number))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
