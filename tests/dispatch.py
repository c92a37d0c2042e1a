"""The extra cost of an operation on a ShardTensor over one on a plain tensor: python -m tests.dispatch

Beside it stands what any subclass of torch.Tensor costs that gives results of its own type with a mark on them, in the
shortest code: the part of the cost that is torch's. F.layer_norm is a Python function, where torch looks for subclasses
in Python too. And what torch's DTensor costs, where it computes the operation.

Microseconds of this machine, so no test; tests count the Python functions that an operation calls.
"""

import math
import statistics
import sys
import time
from collections import defaultdict

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from distributed.shard_tensor import ShardTensor

WIDTH = 4
WEIGHT, BIAS = torch.ones(WIDTH, WIDTH), torch.zeros(WIDTH)
OPERATIONS = {  # of x (1, rows, WIDTH, WIDTH), rows split
    "x * 2": lambda x: x * 2,
    "x + x": lambda x: x + x,
    "x + plain": lambda x: x + BIAS,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "gelu": F.gelu,
    "x[..., 1:]": lambda x: x[..., 1:],
    "x[:, 1:]": lambda x: x[:, 1:],
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "softmax": lambda x: x.softmax(-1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "flatten": lambda x: x.flatten(1, 2),
    "permute": lambda x: x.permute(0, 2, 1, 3),
    "chunk": lambda x: x.chunk(2, -1),
    "cat": lambda x: torch.cat((x, x), -1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "x @ plain": lambda x: x @ WEIGHT,
    "x @ x": lambda x: x @ x,
    "einsum": lambda x: torch.einsum("bnij,bnik->bnjk", x, x),
    "linear": lambda x: F.linear(x, WEIGHT, BIAS),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), BIAS, BIAS),
}


class Shortest(Tensor):
    """A subclass whose results are of its type and have an attribute, and that knows no rules."""

    spec: object

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs) if kwargs else func(*args)
        for part in out if isinstance(out, tuple) else (out,):
            part.__class__ = Shortest
            part.spec = None
        return out


def tiny_tensors(mesh):
    """A plain tensor (1, 2, WIDTH, WIDTH), and the ShardTensor of which it is this rank's part, by rows."""
    plain = torch.randn(1, 2, WIDTH, WIDTH)
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
    """Of a call; nan where a DTensor does not compute it."""
    try:
        function(x)
    except (RuntimeError, NotImplementedError):
        return math.nan
    start = time.perf_counter()
    for _ in range(calls):
        function(x)
    return (time.perf_counter() - start) / calls * 1e6


def main(rounds=60):
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a group of two ranks in one process

    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    plain, split = tiny_tensors(mesh)
    of_torch = DTensor.from_local(plain.clone(), mesh, [Shard(1)], run_check=False)
    tensors = {"plain": plain, "subclass": plain.as_subclass(Shortest), "ShardTensor": split, "DTensor": of_torch}
    tensors["plain, grad"] = plain.clone().requires_grad_()
    tensors["ShardTensor, grad"] = tiny_tensors(mesh)[1].requires_grad_()

    # Short turns of everything, one after another: what disturbs the machine for a while disturbs all alike.
    best = defaultdict(lambda: math.inf)
    for _ in range(rounds):
        for name, function in OPERATIONS.items():
            for kind, x in tensors.items():
                seconds = microseconds(function, x, 20 if kind == "DTensor" else 200)
                best[name, kind] = min(best[name, kind], seconds) if seconds == seconds else math.nan
    titles = ("subclass", 9), ("DTensor", 9), ("ShardTensor", 13), ("with gradients", 16)
    print("microseconds   plain  more:" + "".join(title.rjust(width) for title, width in titles))
    costs = []
    for name in OPERATIONS:
        of_plain = best[name, "plain"]
        costs.append(best[name, "ShardTensor"] - of_plain)
        with_gradients = best[name, "ShardTensor, grad"] - best[name, "plain, grad"]
        of_subclass = best[name, "subclass"] - of_plain
        of_dtensor = best[name, "DTensor"] - of_plain
        shown = "fails" if math.isnan(of_dtensor) else f"{of_dtensor:.1f}"
        print(f"{name:14}{of_plain:6.1f}{of_subclass:16.1f}{shown:>9}{costs[-1]:13.1f}{with_gradients:16.1f}")
    print(f"ShardTensor: median {statistics.median(costs):.1f}, at most {max(costs):.1f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
