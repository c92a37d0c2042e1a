"""What one training step of the forecasting model sends, by method of attention; options as of train_shard.py.

torchrun --nproc_per_node 4 -m docs.examples.domain_messages --config=shard_quick --domain_parallel 2x2
"""

import sys
from contextlib import nullcontext

import torch
from torch import Tensor

from distributed.attention import METHODS
from distributed.data_parallel import data_parallel
from distributed.domain_parallel import split_images
from tools.instruments.counting import CollectiveCounter
from tools.tables import format_table
from train_shard import SPLITS
from training.model import build_model, initial_weights
from training.step import LOSSES
from utils import comm
from utils.config import load_config
from utils.schema import Config
from utils.tiles import own_window


def main() -> None:
    """Print a table: method of attention, messages of the forward pass, of the backward pass."""
    rows = []
    for method in METHODS:
        words = [*sys.argv[1:], f"--domain_method={method}"]
        config = load_config(words, __doc__, comm.world_size(), "config/shard.yaml", SPLITS)
        comm.build_mesh(torch.device("cpu"), config.layout(comm.world_size()))
        forward, backward = messages_of_a_step(config)
        rows.append([method, in_words(forward), in_words(backward)])
    if comm.rank() == 0:
        print(format_table(dict.fromkeys(("method", "forward", "backward"), ""), rows))


def messages_of_a_step(config: Config) -> tuple[CollectiveCounter, CollectiveCounter]:
    """CollectiveCounters of this rank: of the forward pass with the loss, and of the backward pass."""
    model = build_model(config)
    split = split_images(model, config)
    parallel = data_parallel(model, config, torch.device("cpu"), initial_weights(config), split)
    samples = config.global_batch_size // comm.get_size("dp")
    rows, columns = own_window(config.img_size, config.patch_size)
    x, y = torch.randn(2, samples, config.n_in_channels, *config.img_size)[..., rows, columns]

    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        return LOSSES[config.model](prediction, target, comm.get_group("image"))

    def count() -> tuple[CollectiveCounter, CollectiveCounter]:
        forward, total = CollectiveCounter(), CollectiveCounter()
        with total:
            parallel.forward_backward(x, y, loss, 1, lambda: forward, nullcontext)
        return forward, total

    for _ in range(5):  # in the first steps DDP arranges its buckets
        forward, total = count()
    total.calls.subtract(forward.calls)
    total.bytes.subtract(forward.bytes)
    return forward, total


def in_words(counted: CollectiveCounter) -> str:
    """Calls and bytes by kind: '4 all_gather of 98,304 bytes, ...'."""
    return ", ".join(f"{n} {kind} of {counted.bytes[kind]:,} bytes" for kind, n in (+counted.calls).items())


if __name__ == "__main__":
    comm.init("cpu")
    main()
    comm.shutdown()
