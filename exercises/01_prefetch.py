"""Exercise 1, rung 1: read the next batch while the step computes with this one.

Reading, copying and normalising a batch needs the disk, the host's threads and the bus; the step needs the device. So
both can go on at once, and the device need not wait. But each batch that is read ahead takes memory: so many, no more.

Below a thread reads, and yet nothing overlaps: the thread is waited for before anything else happens. Mend it.

Done for real in utils/data_loader.py: DataLoader._batches reads ahead with threads, and _to_device copies to a GPU on a
stream of its own while kernels of the step run. Chapter: docs/one_device.md, "The idea".
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def prefetched(read: Callable[[int], Any], count: int, depth: int) -> Iterator[Any]:
    """Yield read(0), ..., read(count - 1) in this order; read is called in another thread.

    While the caller works with one batch, the next `depth` are being read or lie ready (fewer at the end), never more.
    An error of read(i) reaches the caller who asks for batch i.
    """
    # TODO: start early, wait late
    with ThreadPoolExecutor(1) as pool:
        for i in range(count):
            yield pool.submit(read, i).result()
    # END
