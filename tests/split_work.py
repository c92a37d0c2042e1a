"""Processor time of one of two ranks for its half of a layer, over that of one device: python -m tests.split_work

A half would be 0.5. No test, since a time is never asserted. Both take turns, so that other programs slow down both.
"""

import statistics
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from distributed.shard_tensor import ShardTensor

CHANNELS = 32
ROWS = 2  # the dimension of (B, C, H, W) that is split
WEIGHT, BIAS = torch.ones(CHANNELS), torch.zeros(CHANNELS)


def row_norm(x):
    """Normalize all of a sample, so that the split rows are among the normalized dimensions."""
    return F.group_norm(x, 1, WEIGHT, BIAS)


def column_norm(x):
    """layer_norm over the split rows: its weight has a number for each of them."""
    return F.layer_norm(x.transpose(ROWS, -1), x.shape[ROWS : ROWS + 1])


LAYERS = {
    "conv": nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "conv + group_norm": nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.GroupNorm(8, CHANNELS),
    ),
    "group_norm": nn.GroupNorm(8, CHANNELS),
    "group_norm, 1 group": row_norm,
    "batch_norm": nn.BatchNorm2d(CHANNELS),
    "layer_norm": column_norm,
    "var": lambda x: x.var((ROWS, ROWS + 1)),
    "std": lambda x: x.std(),
}


def seconds(layer, x):
    """Processor time of a forward and a backward pass; a CPU's backward pass runs in the thread that calls it."""
    start = time.thread_time()
    layer(x).square().sum().backward()
    elapsed = time.thread_time() - start
    x.grad = None
    return elapsed


def share_of_one_device(layer, whole, half, rounds):
    """(median of the rounds' ratios of half to whole, median seconds of whole)."""
    seconds(layer, whole)
    seconds(layer, half)
    ratios, times = [], []
    for _ in range(rounds):
        of_whole = seconds(layer, whole)
        of_half = seconds(layer, half)
        ratios.append(of_half / of_whole)
        times.append(of_whole)
    return statistics.median(ratios), statistics.median(times)


def main(rounds=11):
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a group of two ranks in one process

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # no other rank fills what is received: it holds any numbers, and such are slow
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    print(f"{'layer':22}{'pixels':>8}{'one device':>13}{'a rank':>10}  median of {rounds} rounds")
    for pixels in (128, 256, 512):
        whole = torch.randn(1, CHANNELS, pixels, pixels)
        part = whole[:, :, : pixels // 2].clone()
        half = ShardTensor.from_local(part, mesh, [Shard(ROWS)], {0: (pixels // 2,) * 2})
        whole.requires_grad_()
        half.requires_grad_()
        for name, layer in LAYERS.items():
            share, one = share_of_one_device(layer, whole, half, rounds)
            print(f"{name:22}{pixels:8}{one * 1e3:10.1f} ms{share:10.2f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
