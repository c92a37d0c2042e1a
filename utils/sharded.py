"""Tell tensors and modules of torch's sharding without importing it, which takes longer than a short program runs.

An object of a class can be there only if the module of that class has been imported: before that, nothing is one.
`--help` and a refusal therefore never import torch.distributed.tensor. (torch imports it itself with its modules fsdp,
checkpoint, optim and pipelining, imported where they are used, and with torch._dynamo, which a model's first call
imports.)
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard["DTensor"]:
    """Tell whether a value is a DTensor."""
    return _is_of("torch.distributed.tensor", "DTensor", value)


def is_fsdp_module(value: Any) -> TypeGuard["FSDPModule"]:
    """Tell whether a value is a module to which fully_shard was applied."""
    return _is_of("torch.distributed.fsdp", "FSDPModule", value)


def _is_of(module: str, name: str, value: Any) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
