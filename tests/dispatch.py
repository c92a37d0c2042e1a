"""The extra cost of an operation on a ShardTensor over one on a plain tensor: python -m tests.dispatch

Microseconds of this machine, so no test; tests count the Python functions that an operation calls.
"""

import sys
import time

import torch
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


def microseconds(function, x, calls=2000):
    start = time.perf_counter()
    for _ in range(calls):
        function(x)
    return (time.perf_counter() - start) / calls * 1e6


def main(rounds=15):
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a group of two ranks in one process

    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    plain, split = tiny_tensors(mesh)
    print(f"{'operation':18}{'plain':>8}{'ShardTensor':>13}{'more':>7}  microseconds, best of {rounds} rounds")
    for grad in (False, True):
        for x in (plain, split):
            x.requires_grad_(grad)
        for name, function in OPERATIONS.items():
            turns = [(microseconds(function, plain), microseconds(function, split)) for _ in range(rounds)]
            one, other = (min(times) for times in zip(*turns, strict=True))
            kind = f"{name}, grad" if grad else name
            print(f"{kind:18}{one:8.1f}{other:13.1f}{other - one:7.1f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
