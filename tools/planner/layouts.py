"""Every layout of a model on a number of GPUs that a training script can run, and the command that runs it.

The code of the scripts itself decides: Layout, check_config, split_model and split_images accept or refuse a layout.
"""

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from tools.planner.fake import fake_rank
from training.assembly import split_as_configured
from training.models.build import build_model
from utils.command_line import choices, option_words, parse_command_line
from utils.config import SCRIPTS, SPLITS, STRATEGY_KEYS, check_config, read_named_config
from utils.errors import UsageError
from utils.layout import Layout, tile_counts
from utils.schema import ALIASES, Config

CHECKPOINTING = ("none", "full")
SCHEDULES = ("1f1b", "interleaved")  # gpipe holds more and is no faster
MICRO_BATCHES = (4, 2, 1)  # for each stage of a pipeline: the most that the batch allows, for a small bubble
# A split is tried with one block, and a pipeline by itself with all blocks, since neither depends on the other.
ONE_BLOCK = {
    "depth": 1,
    "tp_backend": "native",
    "pipeline_parallel": 1,
    "pp_schedule": "1f1b",
    "gradient_accumulation": 1,
    "ensemble_parallel": 1,
}
ONE_RANK_A_STAGE = {
    "tensor_parallel": 1,
    "context_parallel": 1,
    "domain_parallel": 1,
    "ensemble_parallel": 1,
    "sequence_parallel": False,
    "cp_method": "gather",
    "domain_method": "gather",
    "gradient_accumulation": 1,
}
UNSPLIT = (1, "1", "1x1")  # how a config says that images are not split
WIDEST_TP = 8  # nodes that tensor parallelism may span, where no layout inside a node works


def candidates(
    config: Config,
    gpus: int,
    ranks_per_node: int,
    fixed: Iterable[str] = (),
) -> tuple[list[tuple[Config, Layout]], dict[str, int]]:
    """([(config, layout)], {reason: number of refused layouts}) for a number of GPUs.

    fixed: names of keys that keep their value in config. Tensor-parallel ranks stay inside a node, unless no such
    layout works. A choice without effect is left out: methods of attention over one rank, strategies for one.
    """
    kept = {full_name(key) for key in fixed}
    if config.cpu_offload or config.noddp:
        # Both keys suit only some strategies, so that of the config stays.
        kept.add("data_parallel")
    choice = _Choices(config, gpus, ranks_per_node, frozenset(kept))

    found: list[tuple[Config, Layout]] = []
    refused = Counter[str]()
    refusal = trial(config)
    for tp in choice.tensor_parallel():
        # Across nodes tensor parallelism is slow.
        if tp > ranks_per_node and found:
            break
        try:
            # A size that cannot be is refused once, and not again for each of its layouts.
            Layout(gpus, tp)
        except UsageError as error:
            refused[str(error)] += 1
            continue
        for ens, cp, pp, domain in choice.splits_of_samples(gpus // tp):
            split = dict(zip(SPLITS, (tp, cp, pp, domain), strict=True)) | {"ensemble_parallel": ens}
            ranks_of_a_sample = tp * ens * cp * pp * math.prod(tile_counts(domain))
            # Sizes that were asked for may need more ranks than there are, which check_config refuses.
            dp = max(1, gpus // ranks_of_a_sample)
            several_share_weights = gpus // (tp * pp) > 1
            strategies = list(choice.strategies(dp, several_share_weights))
            for way in choice.ways(dp, tp, cp, pp, domain):
                settings = split | way
                # What the config itself refuses costs nothing; the model is split only for what is left.
                accepted = choice.accepted(settings, strategies, refused)
                reason = refusal(settings) if accepted else None
                if reason:
                    refused[reason] += len(accepted)
                else:
                    found += accepted
    return found, dict(refused)


def full_name(key: str) -> str:
    """The key that another name of it stands for."""
    for name, others in ALIASES.items():
        if key in others:
            return name
    return key


@dataclass(frozen=True)
class _Choices:
    """What is tried of each key, for a number of GPUs. fixed: keys that keep their value in config."""

    config: Config
    gpus: int
    ranks_per_node: int
    fixed: frozenset[str]

    @cached_property
    def keys(self) -> dict[str, Any]:
        """All keys of the config."""
        return self.config.model_dump(exclude={"config"})

    def values(
        self,
        name: str,
        wanted: Sequence[Any],
        of_use: bool = True,
    ) -> Sequence[Any]:
        """The values of a key that are tried. of_use: whether another value than that of config changes anything."""
        is_free = of_use and name not in self.fixed
        if is_free:
            return wanted
        return [getattr(self.config, name)]

    def accepted(
        self,
        settings: dict[str, Any],
        strategies: Iterable[dict[str, Any]],
        refused: Counter[str],
    ) -> list[tuple[Config, Layout]]:
        """[(config, layout)] of the strategies that the config's own checks accept, with a split and a way of it.

        settings: of the split and the way. refused: counts the reason of each of the others.
        """
        accepted = []
        for strategy in strategies:
            wanted = self.keys | settings | strategy
            try:
                checked = check_config(wanted, self.config.config, "", (), self.gpus)
                accepted.append((checked, checked.layout(self.gpus, self.ranks_per_node)))
            except UsageError as error:
                refused[str(error).removeprefix(": ")] += 1
        return accepted

    def tensor_parallel(self) -> Sequence[int]:
        """Sizes of tp."""
        most = WIDEST_TP * self.ranks_per_node
        sizes = [tp for tp in _divisors(self.gpus) if tp <= most]
        return self.values("tensor_parallel", sizes)

    def splits_of_samples(self, ranks: int) -> Iterator[tuple[int, int, int, Any]]:
        """Sizes of ens, cp, pp and domain, among so many ranks."""
        members = self.config.ensemble_size
        sizes = [ens for ens in _divisors(ranks) if ens <= members]
        for ens in self.values("ensemble_parallel", sizes, members > 1):
            for cp, pp, domain in self.splits(max(1, ranks // ens)):
                yield ens, cp, pp, domain

    def splits(self, ranks: int) -> Iterator[tuple[int, int, Any]]:
        """Sizes of cp, pp and domain, among so many ranks."""
        config = self.config
        rows, columns = (n // config.patch_size for n in config.img_size[:2])
        counts = _divisors(ranks)

        # Context and pipeline parallelism.
        cps = self.values("context_parallel", counts)
        pps = self.values("pipeline_parallel", counts)
        is_free = cps == pps == counts
        for cp, pp in itertools.product(cps, pps):
            can_be = ranks % (cp * pp) == 0 and cp <= rows and pp <= config.depth
            # Of sizes that were asked for the scripts say what is wrong.
            if can_be or not is_free:
                yield cp, pp, 1

        # Domain parallelism, which goes without both: bands of rows, or tiles.
        bands = [n for n in counts if 1 < n <= rows]
        tiles = _tiles(counts, rows, columns)
        for domain in self.values("domain_parallel", [*bands, *tiles]):
            splits_images = domain not in UNSPLIT
            if splits_images and 1 in cps and 1 in pps:
                yield 1, 1, domain

    def ways(
        self,
        dp: int,
        tp: int,
        cp: int,
        pp: int,
        domain: Any,
    ) -> Iterator[dict[str, Any]]:
        """Methods and schedules of a split, as settings."""
        share = self.config.global_batch_size // dp
        fitting = [each * pp for each in MICRO_BATCHES if share % (each * pp) == 0]
        micro_batches = fitting[0] if fitting else pp
        # With other splits a rank of sequence_parallel holds less and sends the same bytes.
        slices = [False, True] if cp == pp == 1 else [True]
        # A method or a schedule matters only where its dimension is split.
        options = {
            "sequence_parallel": self.values("sequence_parallel", slices, tp > 1 and domain == 1),
            "cp_method": self.values("cp_method", choices("cp_method"), cp > 1),
            "domain_method": self.values("domain_method", choices("domain_method"), domain != 1),
            "pp_schedule": self.values("pp_schedule", SCHEDULES, pp > 1),
            "gradient_accumulation": self.values("gradient_accumulation", [micro_batches], pp > 1),
        }
        for way in itertools.product(*options.values()):
            yield dict(zip(options, way, strict=True))

    def strategies(self, dp: int, several: bool) -> Iterator[dict[str, Any]]:
        """Data-parallel strategies and activation checkpointing of dp ranks, as settings.

        several: more than one rank has the same weights.
        """
        # Data-parallel ranks of a node, over which hsdp cuts weights.
        ranks_inside = math.gcd(self.ranks_per_node, self.gpus)
        inside = max(1, ranks_inside * dp // self.gpus)
        # The strategy hsdp cuts weights inside a node: where a node has all data-parallel ranks, that is fsdp.
        hsdp_is_fsdp = self.gpus <= self.ranks_per_node or inside == dp or dp == 1
        tried = self.values("data_parallel", choices("data_parallel") if several else ["ddp"])
        for strategy in tried:
            if strategy == "hsdp" and hsdp_is_fsdp and len(tried) > 1:
                continue
            # Keys that belong to other strategies are at their defaults.
            plain = {}
            for key, own in STRATEGY_KEYS.items():
                if strategy not in own:
                    default = Config.model_fields[key].default
                    (plain[key],) = self.values(key, [default])
            for again in self.values("activation_checkpointing", CHECKPOINTING):
                yield {"data_parallel": strategy, "activation_checkpointing": again, **plain}


def _tiles(counts: Iterable[int], rows: int, columns: int) -> Iterator[str]:
    """Rows x columns of ranks, of which each has one of an image's rows and columns of patches at least."""
    for ranks in counts:
        for bands in _divisors(ranks):
            across = ranks // bands
            # Tiles of a single column are bands, which are tried already.
            if across > 1 and bands <= rows and across <= columns:
                yield f"{bands}x{across}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def trial(config: Config) -> Callable[[dict[str, Any]], str | None]:
    """A function that tells why a split of the model is refused, None where it is not, for settings {key: value}."""

    @cache
    def refusal_of(*settings):
        return split_refusal(config.model_copy(update=dict(settings)))

    # Thousands of layouts share these few splits, so that each is tried once.
    def refusal(settings):
        split_of_a_block = settings | ONE_BLOCK
        pipeline_alone = settings | ONE_RANK_A_STAGE
        return refusal_of(*split_of_a_block.items()) or refusal_of(*pipeline_alone.items())

    return refusal


def split_refusal(config: Config) -> str | None:
    """Why the model of a config cannot be split as it says, on an imagined rank; None where it can."""
    tp, cp, pp, domain = (getattr(config, name) for name in SPLITS)
    tiles = tile_counts(domain)
    shared = math.prod(tiles)
    if shared > 1 and config.sequence_parallel and tp > 1:
        return "domain parallelism goes without sequence_parallel: train_mp.py splits a model so"
    layout = Layout(tp * cp * pp * shared, tp, cp, pp, domain=tiles)
    with fake_rank(layout):
        try:
            split_as_configured(build_model(config), config)
        except (ValueError, UsageError) as error:
            return str(error).removeprefix(f"{config.config}: ")
    return None


def script_of(options: Mapping[str, Any]) -> str:
    """The first script that can split a model in all the ways that some keys of a config ask for."""
    used = [key for key in SPLITS if options.get(key, 1) not in UNSPLIT]
    for name, script in SCRIPTS.items():
        # SCRIPTS begins with the script that splits least.
        if set(used) <= set(script.splits):
            return name
    raise UsageError(f"no script has {' and '.join(used)} together")


def arguments(config: Config, words: Iterable[str]) -> list[str]:
    """The options with which a script has this config. words: those that gave the config, whatever the layout."""
    options = parse_command_line(list(words), None, SCRIPTS["train.py"].yaml_config)
    path, name = options["yaml_config"], options["config"]
    script = SCRIPTS[script_of(vars(config))]

    own = []
    if path != script.yaml_config:
        own.append(f"--yaml_config={path}")
    own.append(f"--config={name}")

    # Options name what differs from the file. The global batch is the same in any layout.
    defaults = {key: field.default for key, field in Config.model_fields.items()}
    written = defaults | read_named_config(path, name)
    for key in Config.model_fields:
        value = getattr(config, key)
        is_said_otherwise = key in ("config", "local_batch_size")
        if not is_said_otherwise and value != written[key]:
            own += option_words(key, value)
    return own


def command(
    config: Config,
    layout: Layout,
    words: Iterable[str],
    ranks_per_node: int = 4,
) -> str:
    """The command line that runs a layout: plain python, torchrun on one node, sbatch on several.

    words: the options that gave the config. Raises UsageError for words that are no options.
    """
    script = script_of(vars(config))
    nodes = -(-layout.world_size // ranks_per_node)  # rounded up
    if layout.world_size == 1:
        start = ["python", script]
    elif nodes == 1:
        start = ["torchrun", f"--nproc_per_node={layout.world_size}", script]
    else:
        # The submit scripts ask for four GPUs of a node by themselves.
        per_node = []
        if ranks_per_node != 4:
            per_node = [f"--gpus-per-node={ranks_per_node}"]
        start = ["sbatch", "-N", str(nodes), *per_node, SCRIPTS[script].submit]
    return shlex.join([*start, *arguments(config, words)])
