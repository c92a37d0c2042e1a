"""A case on one rank: its training step and a batch, as measurements of ranks use them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tools.instruments.clock import timed
from tools.instruments.ranks import Case, Process, use_mesh
from training.assembly import build_step, random_batch
from training.forecasting.ensemble import one_member
from utils import comm
from utils.command_line import option_words
from utils.config import SCRIPTS, load_config
from utils.device import synchronize
from utils.schema import Config

WARMUP_STEPS = 3  # DDP arranges its buckets, fully_shard its order, memory is allocated

# words_of_name reads these values of a switch.
SWITCHES = {"true": True, "false": False}


def build_case(
    name: str,
    script: str,
    words: Sequence[str],
    ranks: int,
) -> Case:
    """The Case of a training script with these options. Raises UsageError where it does not fit the ranks.

    name: in a table; options of its own may follow it, as in 'tp2,data_parallel=fsdp'.
    """
    words = [*words, *words_of_name(name)]
    known = SCRIPTS[script]
    config = load_config(words, None, ranks, known.yaml_config, known.splits)
    # Of hsdp without dp_shard half of the ranks share one copy, as on two nodes.
    ranks_per_node = max(1, ranks // 2)
    layout = config.layout(ranks, ranks_per_node)
    return Case(name, config, layout, script, words)


def words_of_name(name: str) -> list[str]:
    """The options that follow a layout's name: 'dp2,sync_batchnorm=true,lr=1e-3' -> --sync_batchnorm --lr=1e-3."""
    words = []
    for option in name.split(",")[1:]:
        key, _, value = option.partition("=")
        field = Config.model_fields.get(key)
        is_switch = field is not None and field.annotation is bool
        if is_switch and value in SWITCHES:
            words += option_words(key, SWITCHES[value])
        else:
            words.append(f"--{option}")
    return words


class RankCase:
    """A case on one rank: its training step, and a batch of random numbers."""

    def __init__(self, rank: Process, case: Case):
        self.rank = rank
        self.device = rank.device
        self.case = case
        # The model is built for the groups that are those of this process by then.
        self.take_turn()
        self.step = build_step(case.config, self.device, f"layout '{case.name}'")
        self.x, self.y = random_batch(self.step.task, self.device)

    def take_turn(self) -> None:
        """Make its groups, and its method of attention over split images, those of this process."""
        from distributed.shard_tensor import set_attention_method  # slow to import

        use_mesh(self.rank, self.case.layout)
        set_attention_method(self.case.config.domain_method)

    def train(self, steps: int) -> None:
        """Make so many optimizer steps, and wait for the last."""
        for _ in range(steps):
            # The learning rate follows the iteration, which is therefore the same in every step.
            self.step(0, self.x, self.y)
        synchronize(self.device)

    def forecast(self, times: int) -> None:
        """Make so many forward passes without gradients, as an evaluation does, and wait for the last."""
        parallel, config = self.step.parallel, self.case.config
        images, *noise = one_member(config, self.x)
        parallel.model.eval()
        with torch.no_grad(), self.step.autocast():
            for _ in range(times):
                parallel.predict(images, config.n_out_channels, *noise)
        # The next turn may train.
        parallel.model.train()
        synchronize(self.device)

    def seconds(self, steps: int, inference: bool = False) -> float:
        """Seconds of a step, or of a forward pass: the mean over some that all ranks start together."""
        repeat = self.forecast if inference else self.train
        repeat(1)  # the turns of other cases have emptied the caches
        if comm.world_size() > 1:
            # A rank that starts early would count its wait for the others.
            dist.barrier()
        seconds, _ = timed(self.device, repeat, steps)
        return seconds / steps


def take_case(rank: Process, case: Case) -> RankCase:
    """On a rank: its RankCase, which it builds and warms up once, and whose turn it is now."""
    key = repr(case)  # each call sends another copy of the case
    if key not in rank.kept:
        rank.kept[key] = RankCase(rank, case)
        rank.kept[key].train(WARMUP_STEPS)
    rank_case: RankCase = rank.kept[key]
    rank_case.take_turn()
    return rank_case


def seconds_of(rank: Process, case: Case) -> float:
    """On a rank: seconds of a step of a case that it holds."""
    return take_case(rank, case).seconds(1)
