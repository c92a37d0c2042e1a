"""Messages of one training step of the forecasting model, by method of attention; options as of train_shard.py.

torchrun --nproc_per_node 4 -m docs.examples.domain_messages --config=shard_quick --domain_parallel 2x2
"""

import sys

import torch

from distributed.attention import METHODS
from tools.instruments.tracker import Messages, by_phase
from tools.planner.trace import observe_step
from tools.tables import format_table
from training.assembly import build_step, random_batch
from utils import comm, connection
from utils.config import SCRIPTS, load_config
from utils.schema import Config

CPU = torch.device("cpu")


def main() -> None:
    """Print a table: method of attention, messages of the forward pass, of the backward pass."""
    script = SCRIPTS["train_shard.py"]
    rows = []
    for method in METHODS:
        words = [*sys.argv[1:], f"--domain_method={method}"]
        config = load_config(words, __doc__, comm.world_size(), script.yaml_config, script.splits)
        comm.build_mesh(CPU, config.layout(comm.world_size()))
        messages = counted(config)
        forward = in_words(messages["forward"])
        backward = in_words(messages["backward"])
        rows.append([method, forward, backward])
    if comm.rank() == 0:
        print(format_table(dict.fromkeys(("method", "forward", "backward"), ""), rows))


def counted(config: Config) -> Messages:
    """{phase: {kind: (collectives, bytes)}} that this rank sends in a training step."""
    step = build_step(config, CPU)
    x, y = random_batch(step.task, CPU)
    for i in range(5):  # in the first steps DDP arranges its buckets
        step(i, x, y)
    return by_phase(observe_step(step, x, y).messages)


def in_words(messages: dict[str, tuple[float, float]]) -> str:
    """Calls and bytes by kind: '4 all_gather of 98,304 bytes, ...'."""
    texts = []
    for kind, (calls, size) in sorted(messages.items()):
        texts.append(f"{calls} {kind} of {size:,} bytes")
    return ", ".join(texts)


if __name__ == "__main__":
    connection.connect("cpu")
    main()
    connection.disconnect()
