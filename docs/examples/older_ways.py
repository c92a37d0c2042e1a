"""Two older ways to use several devices from one process, and why one no longer does.

python -m docs.examples.older_ways                          # all GPUs where there are two, else the CPU twice
python -m docs.examples.older_ways --devices cuda:0 cuda:1
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from networks.vit import ViT
from utils.device import select_device
from utils.errors import ArgumentParser, run_main


def main() -> None:
    """Compare the outputs of both ways with the model on one device."""
    count = torch.cuda.device_count()
    parser = ArgumentParser(description="Two older ways to use several devices from one process.")
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help="where the layers go, in this order")
    gpus = [f"cuda:{i}" for i in range(count)]
    parser.set_defaults(devices=gpus if count > 1 else ["cpu", "cpu"])
    devices = [select_device(name) for name in parser.parse_args().devices]

    torch.manual_seed(0)
    model = ViT((32, 64), 4, in_channels=20, out_channels=20, embed_dim=256, depth=6, num_heads=8)
    x = torch.randn(8, 20, 32, 64)
    expected = model(x).detach()

    whole_model_on_every_gpu(model, x, expected)
    layers_placed_by_hand(model, x, expected, devices)


def whole_model_on_every_gpu(model: nn.Module, x: Tensor, expected: Tensor) -> None:
    """DataParallel: one process for all GPUs of a node.

    In every step it scatters the batch, copies the whole model to every GPU, and gathers the outputs on the first one;
    Python's lock lets the copies launch their kernels only in turn.
    """
    count = torch.cuda.device_count()
    if count:
        how = f"over {count} GPU(s)"
        found = nn.DataParallel(model.cuda())(x.cuda()).detach().cpu()
        model.cpu()
    else:
        how = "finds no GPU and calls the model as it is"
        found = nn.DataParallel(model)(x).detach()
    same = torch.allclose(found, expected, atol=1e-3)
    print(f"DataParallel {how}: same output {same}")


def layers_placed_by_hand(model: ViT, x: Tensor, expected: Tensor, devices: Sequence[torch.device]) -> None:
    """The first layers on one device, the next ones on another; activations are carried over.

    The model may be larger than a device, but while one device computes, the others wait for what it brings.
    """
    blocks = len(model.blocks)
    place = [k * len(devices) // blocks for k in range(blocks)]  # of every block, a number in devices
    model.patch_embed.to(devices[0])
    model.pos_embed.to(devices[0])
    for block, i in zip(model.blocks, place, strict=True):
        block.to(devices[i])
    model.norm.to(devices[-1])
    model.head.to(devices[-1])

    def embed(x: Tensor) -> Tensor:
        return model.pos_embed(model.patch_embed(x))

    def head(x: Tensor) -> Tensor:
        return model.head(model.norm(x))

    last = len(devices) - 1
    layers = [(0, embed), *zip(place, model.blocks, strict=True), (last, head)]
    for _ in range(3):  # the last time counts
        busy = [0.0] * len(devices)
        y = x
        begin = time.perf_counter()
        for i, layer in layers:
            y = y.to(devices[i])
            started = time.perf_counter()
            y = layer(y)
            if devices[i].type != "cpu":
                torch.accelerator.synchronize(devices[i])
            busy[i] += time.perf_counter() - started
        elapsed = time.perf_counter() - begin

    same = torch.allclose(y.detach().cpu(), expected, atol=1e-3)
    print(f"layers by hand over {', '.join(map(str, devices))}: same output {same}")
    for i, device in enumerate(devices):
        own = [k for k in range(blocks) if place[k] == i]
        print(f"  place {i}, {device}: blocks {own}, busy {busy[i] / elapsed:.0%} of a forward pass")
    print(f"  {sum(busy) / elapsed:.0%} together: never more than one device at work, however many there are")


if __name__ == "__main__":
    run_main(main)
