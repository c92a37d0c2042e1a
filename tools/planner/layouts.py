"""Every layout of a model on a number of GPUs that a training script can run, and the command that runs it.

The code of the scripts itself decides: Layout, check_config, split_model and split_images accept or refuse a layout.
"""

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from tools.planner.fake import fake_rank
from training.assembly import split_as_configured
from training.model import build_model
from utils.config import (
    ALIASES,
    SCRIPTS,
    SPLITS,
    STRATEGY_KEYS,
    check_config,
    choices,
    option_words,
    parse_command_line,
    read_named_config,
)
from utils.errors import UsageError
from utils.layout import Layout, tile_counts
from utils.schema import Config

CHECKPOINTING = "none", "full"
SCHEDULES = "1f1b", "interleaved"  # gpipe holds more and is no faster
MICRO_BATCHES = 4, 2, 1  # for each stage of a pipeline: the most that the batch allows, for a small bubble
# A split is tried with one block, and a pipeline by itself with all blocks, since neither depends on the other.
ONE_BLOCK = {
    "depth": 1, "tp_backend": "native", "pipeline_parallel": 1, "pp_schedule": "1f1b", "gradient_accumulation": 1
}  # fmt: skip
ONE_RANK_A_STAGE = {
    "tensor_parallel": 1, "context_parallel": 1, "domain_parallel": 1, "sequence_parallel": False,
    "cp_method": "gather", "domain_method": "gather", "gradient_accumulation": 1,
}  # fmt: skip
WIDEST_TP = 8  # nodes that tensor parallelism may span, where no layout inside a node works


def candidates(
    config: Config, gpus: int, ranks_per_node: int, fixed: Iterable[str] = ()
) -> tuple[list[tuple[Config, Layout]], dict[str, int]]:
    """([(config, layout)], {reason: number of refused layouts}) for a number of GPUs.

    fixed: names of keys that keep their value in config. Tensor-parallel ranks stay inside a node, unless no such
    layout works. A choice without effect is left out: methods of attention over one rank, strategies for one.
    """
    fixed = {next((name for name, others in ALIASES.items() if key in others), key) for key in fixed}
    if config.cpu_offload or config.noddp:
        fixed.add("data_parallel")

    def values(name, wanted, of_use=True):
        """The values of a key that are tried."""
        return wanted if of_use and name not in fixed else [getattr(config, name)]

    def splits(ranks):
        """Sizes of cp, pp and domain, among so many ranks."""
        rows, columns = (n // config.patch_size for n in config.img_size[:2])
        counts = _divisors(ranks)
        cps, pps = values("context_parallel", counts), values("pipeline_parallel", counts)
        for cp, pp in itertools.product(cps, pps):
            free = cps == pps == counts  # else the scripts say what is wrong
            if not free or (ranks % (cp * pp) == 0 and cp <= rows and pp <= config.depth):
                yield cp, pp, 1
        tiles = [n for n in counts if 1 < n <= rows]
        tiles += [f"{r}x{n // r}" for n in counts for r in _divisors(n) if r < n and r <= rows and n // r <= columns]
        for domain in values("domain_parallel", tiles):
            if domain not in (1, "1", "1x1") and 1 in cps and 1 in pps:
                yield 1, 1, domain

    def ways(dp, tp, cp, pp, domain):
        """Methods and schedules of a split, as settings."""
        share = config.global_batch_size // dp
        micro_batches = [next((each * pp for each in MICRO_BATCHES if share % (each * pp) == 0), pp)]
        slices = [False, True] if cp == pp == 1 else [True]  # a rank holds less and sends the same bytes
        options = {
            "sequence_parallel": values("sequence_parallel", slices, tp > 1 and domain == 1),
            "cp_method": values("cp_method", choices("cp_method"), cp > 1),
            "domain_method": values("domain_method", choices("domain_method"), domain != 1),
            "pp_schedule": values("pp_schedule", SCHEDULES, pp > 1),
            "gradient_accumulation": values("gradient_accumulation", micro_batches, pp > 1),
        }
        for way in itertools.product(*options.values()):
            yield dict(zip(options, way, strict=True))

    def strategies(dp, several):
        """Data-parallel strategies and activation checkpointing of dp ranks, as settings.

        several: more than one rank has the same weights.
        """
        inside = max(1, math.gcd(ranks_per_node, gpus) * dp // gpus)
        tried = values("data_parallel", choices("data_parallel") if several else ["ddp"])
        for strategy in tried:
            if strategy == "hsdp" and len(tried) > 1 and (gpus <= ranks_per_node or inside == dp or dp == 1):
                continue  # the same as fsdp
            for again in values("activation_checkpointing", CHECKPOINTING):
                # Keys that belong to other strategies are at their defaults.
                others = [key for key, own in STRATEGY_KEYS.items() if strategy not in own]
                plain = {key: values(key, [Config.model_fields[key].default])[0] for key in others}
                yield {"data_parallel": strategy, "activation_checkpointing": again, **plain}

    found: list[tuple[Config, Layout]] = []
    refused = Counter[str]()
    refusal, keys = trial(config), config.model_dump(exclude={"config"})
    for tp in values("tensor_parallel", [tp for tp in _divisors(gpus) if tp <= WIDEST_TP * ranks_per_node]):
        if tp > ranks_per_node and found:
            break
        try:
            Layout(gpus, tp)
        except UsageError as error:
            refused[str(error)] += 1
            continue
        for cp, pp, domain in splits(gpus // tp):
            split = dict(zip(SPLITS, (tp, cp, pp, domain), strict=True))
            dp = max(1, gpus // (tp * cp * pp * math.prod(tile_counts(domain))))
            own_strategies = list(strategies(dp, gpus // (tp * pp) > 1))
            for way in ways(dp, *split.values()):
                takes = []
                for own in own_strategies:
                    try:
                        checked = check_config(keys | split | way | own, config.config, "", (), gpus)
                        takes.append((checked, checked.layout(gpus, ranks_per_node)))
                    except UsageError as error:
                        refused[str(error).removeprefix(": ")] += 1
                if takes and (reason := refusal(split | way)):
                    refused[reason] += len(takes)
                else:
                    found += takes
    return found, dict(refused)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def trial(config: Config) -> Callable[[dict[str, Any]], str | None]:
    """A function that tells why a split of the model is refused, None where it is not, for settings {key: value}."""

    @cache
    def refusal(*settings):
        return split_refusal(config.model_copy(update=dict(settings)))

    return lambda settings: refusal(*(settings | ONE_BLOCK).items()) or refusal(*(settings | ONE_RANK_A_STAGE).items())


def split_refusal(config: Config) -> str | None:
    """Why the model of a config cannot be split as it says, on an imagined rank; None where it can."""
    tp, cp, pp, domain = (getattr(config, name) for name in SPLITS)
    tiles = tile_counts(domain)
    shared = math.prod(tiles)
    if shared > 1 and config.sequence_parallel and tp > 1:
        return "domain parallelism goes without sequence_parallel: train_mp.py splits a model so"
    with fake_rank(Layout(tp * cp * pp * shared, tp, cp, pp, domain=tiles)):
        try:
            split_as_configured(build_model(config), config)
        except (ValueError, UsageError) as error:
            return str(error).removeprefix(f"{config.config}: ")
    return None


def script_of(options: Mapping[str, Any]) -> str:
    """The first script that can split a model in all the ways that some keys of a config ask for."""
    used = [key for key in SPLITS if options.get(key, 1) not in (1, "1", "1x1")]
    for name, script in SCRIPTS.items():
        if set(used) <= set(script.splits):
            return name
    raise UsageError(f"no script has {' and '.join(used)} together")


def arguments(config: Config, words: Iterable[str]) -> list[str]:
    """The options with which a script has this config. words: those that gave the config, whatever the layout."""
    options = parse_command_line(list(words), None, SCRIPTS["train.py"].yaml_config)
    path, name = options["yaml_config"], options["config"]
    written = {key: field.default for key, field in Config.model_fields.items()} | read_named_config(path, name)
    own = [] if path == SCRIPTS[script_of(vars(config))].yaml_config else [f"--yaml_config={path}"]
    own.append(f"--config={name}")
    for key in Config.model_fields:
        value = getattr(config, key)
        if key not in ("config", "local_batch_size") and value != written[key]:  # the global batch is the same anywhere
            own += option_words(key, value)
    return own


def command(config: Config, layout: Layout, words: Iterable[str], ranks_per_node: int = 4) -> str:
    """The command line that runs a layout: plain python, torchrun on one node, sbatch on several.

    words: the options that gave the config. Raises UsageError for words that are no options.
    """
    script = script_of(vars(config))
    nodes = -(-layout.world_size // ranks_per_node)
    if layout.world_size == 1:
        start = ["python", script]
    elif nodes == 1:
        start = ["torchrun", f"--nproc_per_node={layout.world_size}", script]
    else:
        per_node = [] if ranks_per_node == 4 else [f"--gpus-per-node={ranks_per_node}"]
        start = ["sbatch", "-N", str(nodes), *per_node, SCRIPTS[script].submit]
    return shlex.join([*start, *arguments(config, words)])
