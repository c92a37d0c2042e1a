"""Watch every operation that a piece of code runs."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Context: `saw` is called after each operation, eager or compiled, on the plain tensors that it worked on."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: torch.compile does not run under other modes; what compiled code does comes by here as well."""
        return True

    def saw(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """func: a torch._ops.OpOverload, which has made `result` from the arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # down here a ShardTensor is its local part
            result = func(*args, **(kwargs or {}))
            self.saw(func, args, kwargs or {}, result)
        return result
