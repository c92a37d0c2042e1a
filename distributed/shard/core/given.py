"""What ShardTensor takes from outside: distributed/shard_tensor.py sets it, and without it there is less.

So this folder needs nothing of the models, settings and processes around it, and could be a package of its own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

# {name: attention over split tokens}: (q, k, v, dropout_p, sizes=, group=, mask=) -> y, of this rank's parts.
attention_methods: dict[str, Callable[..., Any]] = {}


class Hooks:
    """Functions that others set. random_stream(device, stream): a context in which random numbers are of a stream.

    prepare_group(group): what a process group needs that was made here.
    """

    random_stream: Callable[[torch.device, int], AbstractContextManager[None]] = staticmethod(lambda *_: nullcontext())
    prepare_group: Callable[[dist.ProcessGroup], None] = staticmethod(lambda group: None)
