"""Settings of a run: a named config of a YAML file, overridden by command-line options, checked against a schema.

The file is YAML 1.2 (so `5e-4` is a number); configs inherit from each other by YAML anchors. Every field of Config
is a key of the file and an option of the command line; an option wins.
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from utils.choices import LOSSES
from utils.command_line import parse_command_line
from utils.errors import UsageError, nearest
from utils.launch import fit, fitting_ranks
from utils.schema import MOST_STEPS, Affects, Config, keys_that_affect
from utils.yaml_files import read_mappings, yaml


class Script(NamedTuple):
    """A training script: its file of configs, the keys by which it splits a model, what starts it on several nodes."""

    yaml_config: str
    splits: tuple[str, ...]
    submit: str


SCRIPTS = {
    "train.py": Script(
        yaml_config="config/ViT.yaml",
        splits=(),
        submit="submit_dp.sh",
    ),
    "train_mp.py": Script(
        yaml_config="config/mp.yaml",
        splits=("tensor_parallel", "context_parallel", "pipeline_parallel"),
        submit="submit_mp.sh",
    ),
    "train_shard.py": Script(
        yaml_config="config/shard.yaml",
        splits=("tensor_parallel", "domain_parallel"),
        submit="submit_shard.sh",
    ),
}
SPLIT_KEYS = ("tensor_parallel", "context_parallel", "pipeline_parallel", "domain_parallel")


def _scripts_that_split_by(key: str) -> str:
    """The names of the scripts that split a model by a key: 'train_mp.py or train_shard.py'."""
    names = [name for name, script in SCRIPTS.items() if key in script.splits]
    return " or ".join(names)


# Every key that splits a model, and the scripts that do it, in words.
SPLITS = {key: _scripts_that_split_by(key) for key in SPLIT_KEYS}
SHARDED = ("zero2", "fsdp", "hsdp")
REPLICATED = ("ddp", "zero1")
STRATEGIES = (*REPLICATED, *SHARDED)
ENSEMBLE_KEYS = ("noise_features", "noise_correlation", "crps_alpha")  # they mean something with several members only
# Keys that belong to some values of data_parallel only.
STRATEGY_KEYS = {
    "cpu_offload": SHARDED,
    "gather_dtype": SHARDED,
    "prefetch": SHARDED,
    "wrap_policy": SHARDED,
    "bucket_cap_mb": REPLICATED,
    "enable_channels_last": REPLICATED,
    "noddp": ("ddp",),
    "gradient_compression": ("ddp",),
    "dp_shard": ("hsdp",),
}


def load_config(
    argv: Sequence[str] | None = None,
    description: str | None = None,
    world_size: int = 1,
    yaml_config: str = "config/ViT.yaml",
    splits: Collection[str] = (),
    preset: dict[str, Any] | None = None,
    elastic: bool = False,
) -> Config:
    """Config from the command line: `--yaml_config FILE --config NAME` and any key of the schema.

    world_size: ranks of the run. splits: the keys by which this program can split a model. preset: {key: value} in
    place of the file's, where no option says otherwise. elastic: ranks may come and go.
    Raises UsageError, naming file, config and key, for values that do not fit the schema, and for ranks or batches that
    cannot be shared equally.
    """
    # Words of the command line win over the preset, and that over the file.
    words = sys.argv[1:] if argv is None else argv
    options = parse_command_line(words, description, yaml_config)
    path = options.pop("yaml_config")
    name = options.pop("config")
    chosen = {**(preset or {}), **options}
    settings = {**read_named_config(path, name), **chosen}
    where = f"{path}: {name}"
    if "local_batch_size" in chosen and "global_batch_size" not in chosen:
        # How many ranks share the batch follows from the other settings, which are therefore checked first.
        layout = check_config(settings, name, where, options).layout(world_size)
        settings["global_batch_size"] = chosen["local_batch_size"] * layout.dp
    if elastic or settings.get("elastic"):
        settings["elastic"] = True
        config = check_config(settings, name, where, options)
        settings |= fit(config, world_size)
        world_size = fitting_ranks(config, world_size)
    config = check_config(settings, name, where, options, world_size)
    for key_name, script in SPLITS.items():
        # A script refuses what only another one can split.
        if getattr(config, key_name) not in (1, "1x1") and key_name not in splits:
            raise UsageError(f"{key_name} {getattr(config, key_name)}: the model is split by {script}")
    if "domain_parallel" in splits and (config.sequence_parallel or config.tp_backend != "native"):
        raise UsageError(
            f"{path}: {name}: train_shard.py goes without sequence_parallel and tp_backend dtensor: use train_mp.py"
        )
    return config


def read_named_config(path: Path | str, name: str) -> dict[str, Any]:
    """The mapping of one named config of a YAML file, unchecked."""
    configs = read_mappings(path, "configs")
    if name not in configs:
        raise UsageError(f"{path}: no config '{name}'{nearest(name, configs)}; it has {', '.join(map(str, configs))}")
    return configs[name]


def check_config(
    settings: dict[str, Any],
    name: str,
    where: str,
    options: Collection[str] = (),
    world_size: int | None = None,
) -> Config:
    """Config from a mapping; `options` names the keys that came from the command line, for the message.

    world_size: None skips the check that the batch can be shared equally.
    """
    try:
        config = Config(config=name, **settings)
    except ValidationError as error:
        raise UsageError(explain(error, Config, where, options)) from None
    # Problems are looked for one by one, and the first ends it.
    of_ranks = _of_ranks(config, world_size) if world_size else ()
    for problem in chain(of_ranks, _of_options(config), _of_ensemble(config), _of_rollout(config)):
        raise UsageError(f"{where}: {problem}")
    return config


def _of_ranks(config: Config, world_size: int) -> Iterator[str]:
    """Why so many ranks cannot train this: they do not share the batch equally, or the split excludes an option."""
    dp = config.layout(world_size).dp
    batch = config.global_batch_size
    per_rank = config.local_batch_size
    # Only data-parallel ranks share a batch.
    ranks = f"{dp} ranks" if dp == world_size else f"{dp} data-parallel ranks"
    if per_rank is not None and per_rank * dp != batch:
        yield f"global_batch_size {batch} is not local_batch_size {per_rank} x {ranks}: give one of them"
    # Every rank has as many samples in every micro-batch.
    count = config.gradient_accumulation
    if batch % (dp * count):
        accumulated = f" in {count} micro-batches" if count > 1 else ""
        why = f"it is not a multiple of {dp * count}"
        yield f"global_batch_size {batch} cannot be shared by {ranks}{accumulated}: {why}"
    if config.amp_mode == "fp8" and dp < world_size:
        yield "amp_mode fp8 goes with data parallelism alone: use bf16 where a model is split"
    if config.tp_backend == "dtensor" and config.tensor_parallel > 1:
        if config.data_parallel in REPLICATED and dp * config.context_parallel > 1:
            yield f"tp_backend dtensor goes with data_parallel zero2, fsdp or hsdp, not {config.data_parallel}"
        if config.sequence_parallel or config.dropout:
            yield "tp_backend dtensor goes without sequence_parallel and dropout: use native"
        if config.amp_mode == "fp16":  # torch's gradient scaler takes no mixture of DTensors and plain tensors
            yield "tp_backend dtensor goes without amp_mode fp16: use bf16, or native"
    if config.enable_jit and config.dropout and config.tensor_parallel > 1 and not config.sequence_parallel:
        yield (
            "enable_jit with dropout and tensor_parallel needs sequence_parallel (train_mp.py): ranks that share "
            "activations draw their random numbers outside of a compiled graph"
        )
    # With fewer micro-batches than stages some stage would have nothing to do.
    stages = config.pipeline_parallel
    if config.pp_schedule != "gpipe" and count < stages:
        yield (
            f"pp_schedule {config.pp_schedule} over {stages} stages needs at least as many micro-batches: give a "
            f"--gradient_accumulation of {stages} or more, which divides the {batch // dp} samples of a rank"
        )


def _of_options(config: Config) -> Iterator[str]:
    """Options that do not go together, whatever the ranks."""
    if config.elastic and config.run_num == "auto":
        yield "where ranks come and go they go on in one folder: give a run_num, not auto"
    if config.micro_batch_size and not config.elastic:
        yield "micro_batch_size belongs to elastic, where ranks may come and go: give gradient_accumulation"
    if config.lr_scaling != "none" and config.base_batch_size is None:
        yield f"lr_scaling {config.lr_scaling} needs base_batch_size, the batch that lr belongs to"
    if config.weight_decay_all and not config.weight_decay:
        yield "weight_decay_all belongs to weight_decay, the part of a weight that a step takes away: give both"
    optimizer = config.optimizer_kind
    for name in ("muon_momentum", "muon_weights"):
        if not optimizer.trains_matrices and getattr(config, name) != Config.model_fields[name].default:
            yield f"{name} belongs to optimizer Muon, not to {config.optimizer}"
    if config.enable_cuda_graphs and "capturable" not in optimizer.takes:
        yield (
            f"enable_cuda_graphs goes without optimizer {config.optimizer}, whose learning rate is a number of the "
            "host: use AdamW"
        )
    if config.enable_fused and "fused" not in optimizer.takes:
        yield f"enable_fused goes without optimizer {config.optimizer}, which has no fused kernel: use AdamW"
    if config.weight_decay and not optimizer.decouples:
        yield (
            f"weight_decay goes without optimizer {config.optimizer}, which would add it to the gradient instead of "
            "taking it from the weight: use AdamW"
        )
    for name, strategies in STRATEGY_KEYS.items():
        if config.data_parallel not in strategies and getattr(config, name) != Config.model_fields[name].default:
            yield f"{name} belongs to data_parallel {' and '.join(strategies)}, not to {config.data_parallel}"
    computed = {"fp8": "bf16"}.get(config.amp_mode, config.amp_mode)  # what fp8 leaves is in bf16
    if "none" not in (computed, config.gather_dtype) and computed != config.gather_dtype:
        yield (
            f"gather_dtype {config.gather_dtype} with amp_mode {config.amp_mode} mixes two half precisions: give "
            f"gather_dtype {computed}, or none"
        )
    if config.enable_cuda_graphs and config.amp_mode == "fp16" and not config.enable_fused:
        yield (
            "enable_cuda_graphs with amp_mode fp16 needs enable_fused: only then does the decision to skip a step stay "
            "on the device"
        )
    if config.init_from is None and (config.init_map or config.init_missing != "error"):
        yield "init_map and init_missing belong to init_from, the file of weights to start with"
    if config.domain_parallel not in (1, "1", "1x1"):
        if config.context_parallel > 1:
            yield "domain_parallel goes without context_parallel, which splits the same tokens: give it all their ranks"
        if config.pipeline_parallel > 1:
            yield (
                "domain_parallel goes without pipeline_parallel, whose stages exchange whole tokens: split the weights "
                "with tensor_parallel or data_parallel fsdp"
            )
    if config.freeze and config.pipeline_parallel > 1:
        yield "freeze goes without pipeline_parallel: a stage without gradients has nothing to send back"
    if not config.loss_kind.is_weighted and (config.channel_weights or config.pressure_weights):
        weighted = " and ".join(name for name, loss in LOSSES.items() if loss.is_weighted)
        yield f"channel_weights and pressure_weights belong to loss {weighted}, not {config.loss}"
    if len(set(config.forcings)) < len(config.forcings):
        yield f"forcings {config.forcings}: one is named twice"


def _of_ensemble(config: Config) -> Iterator[str]:
    """Options of an ensemble that do not go together, or that mean nothing without one."""
    members = config.ensemble_size
    ranks = config.ensemble_parallel
    scores_members = config.loss_kind.scores_members
    if members == 1:
        if scores_members:
            yield f"loss {config.loss} scores the members of an ensemble: give an ensemble_size of 2 or more"
        if ranks > 1:
            yield f"ensemble_parallel {ranks} shares out the members of a sample: give ensemble_size too"
        for name in ENSEMBLE_KEYS:
            if getattr(config, name) != Config.model_fields[name].default:
                yield f"{name} belongs to an ensemble: give an ensemble_size of 2 or more"
        return
    if not scores_members:
        suited = " or ".join(name for name, loss in LOSSES.items() if loss.scores_members)
        yield f"ensemble_size {members}: members are trained by loss {suited}, not {config.loss}"
    if ranks > members:
        yield f"ensemble_parallel {ranks}: more ranks than the {members} members of ensemble_size"
    if config.pipeline_parallel > 1:
        yield (
            "ensemble_size goes without pipeline_parallel, whose stages exchange nothing but tokens: split with "
            "tensor_parallel, context_parallel or ensemble_parallel"
        )


def _of_rollout(config: Config) -> Iterator[str]:
    """The stages of a rollout do not follow each other, or a step does not give what the next one takes."""
    firsts = [0, *(first for first, _ in config.rollout_schedule)]
    is_increasing = sorted(set(firsts)) == firsts
    has_good_steps = all(1 <= steps <= MOST_STEPS for _, steps in config.rollout_schedule)
    if not is_increasing or not has_good_steps:
        yield (
            f"rollout_schedule {config.rollout_schedule}: give pairs of an iteration, in increasing order from 1, and "
            f"of the steps from there on, 1 to {MOST_STEPS}"
        )
    n_in = config.n_in_channels
    n_out = config.n_out_channels
    steps = config.longest_rollout
    if steps > 1 and n_out < n_in:
        given = f"the model takes {n_in} channels and forecasts {n_out}"
        yield f"rollout_steps {steps}: {given}, not enough for a second step"
    if config.predict == "change" and n_in < n_out:
        yield "predict change: n_out_channels must not exceed n_in_channels, which they change"
    if config.pipeline_parallel > 1 and (steps > 1 or config.predict == "change"):
        yield (
            f"pipeline_parallel {config.pipeline_parallel}: a pipeline trains one step, of the state: split with "
            "tensor_parallel or context_parallel, or give rollout_steps 1, no rollout_schedule, and predict state"
        )


def write_config(config: Config, path: Path) -> None:
    """Write the resolved config as a YAML file that --yaml_config reads back."""
    with open(path, "w") as file:
        yaml().dump({config.config: config.model_dump(exclude={"config"})}, file)


def differing_keys(old: Config, new: Config, *affecting: Affects) -> list[str]:
    """Keys, in schema order, that affect one of these and differ; by default what decides the numbers of a run."""
    # Keys of layout, speed and folders may change in a resumed run.
    keys = keys_that_affect(*(affecting or ("model", "result", "training")))
    return [key for key in keys if getattr(old, key) != getattr(new, key)]


def explain(
    error: ValidationError,
    schema: type[BaseModel],
    where: str,
    options: Collection[str] = (),
) -> str:
    """One line about the first value that does not fit the schema; `options` came from the command line."""
    # pydantic lists all problems, and one line has room for one.
    problem = min(error.errors(), key=lambda problem: problem["type"] == "missing")  # a misspelt key first
    name, *deeper = map(str, problem["loc"])
    # A problem deeper inside is one of the model there: its place becomes a part of `where`.
    while len(deeper) > 1:
        inner = _model_of_values(schema, name)
        if inner is None:
            break
        schema = inner
        where = f"{where}: {deeper[0]}"
        name, *deeper = deeper[1:]
    if name in options:
        where = "command line"
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key '{name}'{nearest(name, schema.model_fields)}"
    if problem["type"] == "missing":
        return f"{where}: key '{name}' is missing ({schema.model_fields[name].description})"
    # To YAML {t2m:2} is a key without a value.
    last = deeper[-1] if deeper else ""
    if problem["input"] is None and ":" in last:
        meant = last.replace(":", ": ", 1)
        return f"{where}: {name}: '{last}' has no value: give a space after the colon, {{{meant}}}"
    # pydantic's own words follow the value.
    message = problem["msg"].removeprefix("Input ")
    return f"{where}: {name}: {problem['input']!r} {message}"


def _model_of_values(schema: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model M of a field dict[..., M], None for any other field."""
    kinds = get_args(schema.model_fields[name].annotation)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
