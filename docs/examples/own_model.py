"""A model of one's own on one image over all ranks: torchrun --nproc_per_node 2 -m docs.examples.own_model"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from distributed.shard_tensor import scatter_tensor
from networks.unet import UNet


def train_step() -> None:
    """One training step on an image split by rows; output and gradients are compared with those of the whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    torch.manual_seed(0)  # the same weights on every rank
    model = UNet((46, 64), in_channels=3, out_channels=2, width=8, levels=1)
    image = torch.randn(1, 3, 46, 64)

    x = scatter_tensor(image, 0, mesh, [Shard(2)])  # rank 0 sends each rank its rows and nothing else
    y = model(x)  # the model's code is as it was
    loss = (y - y.mean()).square().mean()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # a rank has a part of each weight's gradient: the sum is the serial one
    columns = y.redistribute([Shard(3)])  # one all-to-all
    if dist.get_rank() == 0:
        print("image", tuple(x.shape), "of which rank 0 holds", tuple(x.to_local().shape))
        print("output", tuple(y.shape), y.placements, "by columns", tuple(columns.to_local().shape))

    expected = model(image)
    torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-5, atol=1e-5)
    split = [p.grad for p in model.parameters()]
    model.zero_grad()  # lets go of them
    (expected - expected.mean()).square().mean().backward()
    torch.testing.assert_close(split, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-6)
    if dist.get_rank() == 0:
        print("output and gradients are those of the whole image")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train_step()
    dist.destroy_process_group()
