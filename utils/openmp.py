"""How long threads of OpenMP wait for more work, awake, before they sleep. Set before torch is loaded.

A thread that has done its part of an operation spins: for the next operation it is there at once. Where other programs
want the same cores, it spins in their way, and the thread that it waits for has no core to run on. GNU's OpenMP, which
PyTorch brings along, spins 300,000 times by default, which is longer than most of a small model's operations take.
"""

import os
from collections.abc import MutableMapping

# Any of these is a user's own choice. The last one is read by the OpenMP of Intel and LLVM.
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# As fast as the default on idle cores, and 2.6 times as fast beside other work: python -m tests.waiting_threads
SPINS = 30_000


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set how often waiting threads spin, in the environment of this process and of those that it starts.

    A choice that is there already stays. It has no effect on a process that has loaded torch before.
    """
    if not any(name in environment for name in CHOICES):
        environment["GOMP_SPINCOUNT"] = str(SPINS)
