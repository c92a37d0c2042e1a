"""The extra cost of an operation on a ShardTensor over one on a plain tensor: python -m tests.dispatch

Beside it stands what any subclass of torch.Tensor costs that gives results of its own type with a mark on them, in the
shortest code: the part of the cost that is torch's. F.layer_norm is a Python function, where torch looks for subclasses
in Python too.

Microseconds of this machine, so no test; tests count the Python functions that an operation calls.
"""

import sys
import time
from collections import defaultdict

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from distributed.shard_tensor import ShardTensor

WIDTH = 4
WEIGHT, BIAS = torch.ones(WIDTH, WIDTH), torch.zeros(WIDTH)
OPERATIONS = {
    "add": lambda x: x + x,
    "mul": lambda x: x * 2,
    "gelu": F.gelu,
    "linear": lambda x: F.linear(x, WEIGHT, BIAS),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), BIAS, BIAS),
    "flatten": lambda x: x.flatten(1, 2),
    "transpose": lambda x: x.transpose(1, 2),
}
KINDS = ("plain tensor", "shortest subclass", "ShardTensor")


class Shortest(Tensor):
    """A subclass whose results are of its type and have an attribute, and that knows no rules."""

    spec: object

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs) if kwargs else func(*args)
        out.__class__ = Shortest
        out.spec = args[0].spec
        return out


def tiny_tensors(mesh):
    """A plain tensor (1, 2, 2, WIDTH), and the ShardTensor of which it is this rank's part, by rows."""
    plain = torch.randn(1, 2, 2, WIDTH)
    return plain, ShardTensor.from_local(plain, mesh, [Shard(1)], {0: (2,) * mesh.size()})


def python_calls(function, x):
    """Count the Python functions that function(x) calls."""
    function(x)  # what is made at the first call
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function(x)
    finally:
        sys.setprofile(None)
    return calls


def microseconds(function, x, calls=200):
    start = time.perf_counter()
    for _ in range(calls):
        function(x)
    return (time.perf_counter() - start) / calls * 1e6


def main(rounds=150):
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a group of two ranks in one process

    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    print(f"{'operation':18}{'plain':>8}  more: {'shortest subclass':>18}{'ShardTensor':>13}   microseconds")
    for grad in (False, True):
        plain, split = tiny_tensors(mesh)
        shortest = plain.as_subclass(Shortest)
        shortest.spec = split.spec
        tensors = dict(zip(KINDS, (plain, shortest, split), strict=True))
        for x in tensors.values():
            x.requires_grad_(grad)
        # Short turns of everything, one after another: what disturbs the machine for a while disturbs all alike.
        best = defaultdict(lambda: float("inf"))
        for _ in range(rounds):
            for name, function in OPERATIONS.items():
                for kind, x in tensors.items():
                    best[name, kind] = min(best[name, kind], microseconds(function, x))
        for name in OPERATIONS:
            of_plain, of_shortest, of_split = (best[name, kind] for kind in KINDS)
            title = f"{name}, grad" if grad else name
            more = f"{of_shortest - of_plain:25.1f}{of_split - of_plain:13.1f}"
            print(f"{title:18}{of_plain:8.1f}{more}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
