"""Settings of a run: a named config of a YAML file, overridden by command-line options, checked against a schema.

The file is YAML 1.2 (so `5e-4` is a number); configs inherit from each other by YAML anchors. Every field of Config
is a key of the file and an option of the command line; an option wins.
"""

import argparse
import difflib
import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from utils.errors import ArgumentParser, UsageError

Text = Annotated[str, Field(min_length=1)]


def key(description, default=...):
    return Field(default, description=description)


class Config(BaseModel):
    """The schema. Types are strict: a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    config: Text = key("name of the configuration in the YAML file")

    embed_dim: PositiveInt = key("embedding size")
    depth: PositiveInt = key("number of transformer blocks")
    num_heads: PositiveInt = key("attention heads")
    mlp_ratio: PositiveFloat = key("hidden size of the MLP / embedding size")
    patch_size: PositiveInt = key("grid points along one side of a patch")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability")

    img_size: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] = key("points: latitude longitude")
    n_in_channels: PositiveInt = key("channels of the input, the first ones of the file")
    n_out_channels: PositiveInt = key("channels to forecast, the first ones of the file")
    dt: PositiveInt = key("forecast lead, in time steps of the file")
    train_data_path: Text = key("folder of the training years (.h5)")
    valid_data_path: Text = key("folder of the validation years")
    inf_data_path: Text = key("folder of the test years")
    global_means_path: Text = key("mean of each channel (.npy)")
    global_stds_path: Text = key("standard deviation of each channel (.npy)")
    time_means_path: Text = key("time mean of each channel at each point (.npy), the climatology")
    limit_nsamples: PositiveInt | None = key("train on the first samples only", None)
    limit_nsamples_val: PositiveInt | None = key("validate on the first samples only", None)
    data_loader_config: Literal["pytorch", "dali"] = key("data loader: native or NVIDIA DALI", "pytorch")
    num_data_workers: NonNegativeInt = key("threads (DALI: processes) that read ahead; 0: none", 0)

    global_batch_size: PositiveInt = key("samples of one optimizer step, over all devices")
    local_batch_size: PositiveInt | None = key("samples of one step on one device; sets global_batch_size", None)
    num_iters: PositiveInt = key("optimizer steps of the whole run")
    optimizer: Literal["Adam", "AdamW"] = key("optimizer")
    gradient_accumulation: PositiveInt = key("micro-batches that a device computes for one optimizer step", 1)
    lr: PositiveFloat = key("peak learning rate, of base_batch_size where it is scaled")
    lr_scaling: Literal["none", "linear", "sqrt"] = key("how lr grows with global_batch_size / base_batch_size", "none")
    base_batch_size: PositiveInt | None = key("global batch for which lr was chosen", None)
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = key("Adam betas")
    lr_schedule: Literal["cosine", "constant"] = key("learning rate after the warmup")
    warmup: NonNegativeInt = key("iterations of linear warmup", 0)
    clip_grad_norm: PositiveFloat | None = key("clip gradients to this global norm", None)
    seed: NonNegativeInt = key("seed of weights, sample order and dropout", 0)

    comm_timeout: PositiveInt = key("seconds after which a rank that waits for another gives up", 600)
    watchdog_timeout: PositiveInt = key("seconds without a finished step after which the run ends", 1800)

    device: Text = key("auto, cpu, cuda, cuda:1, mps, ...", "auto")
    amp_mode: Literal["none", "bf16", "fp16"] = key("automatic mixed precision", "none")
    enable_fused: bool = key("fused optimizer kernel", False)
    enable_jit: bool = key("torch.compile the model", False)
    enable_cuda_graphs: bool = key("the whole step as one CUDA graph", False)
    enable_tf32: bool = key("TF32 in float32 matrix products and convolutions on a GPU", False)
    enable_channels_last: bool = key("channels-last memory format in convolutions", False)
    activation_checkpointing: Literal["none", "full", "selective"] = key(
        "recompute blocks in the backward pass: whole, or all but matrix products and attention", "none"
    )
    checkpointing_interval: PositiveInt = key("recompute only every k-th block", 1)

    data_parallel: Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"] = key("what the data-parallel ranks share", "ddp")
    noddp: bool = key("no gradient reduction: to measure what it costs; ranks train apart", False)
    bucket_cap_mb: PositiveFloat = key("ddp, zero1: MiB of gradients in one reduction", 25)
    gradient_compression: Literal["none", "bf16"] = key("ddp: reduce gradients in bfloat16", "none")
    dp_shard: PositiveInt | None = key("hsdp: ranks that share one copy; null: those of a node", None)
    wrap_policy: Literal["block", "size", "none"] = key("zero2, fsdp, hsdp: what is gathered at once", "block")
    wrap_min_params: PositiveInt = key("parameters of a unit with wrap_policy size", 1_000_000)
    prefetch: NonNegativeInt = key("zero2, fsdp, hsdp: units gathered ahead; 0: torch's own choice", 0)
    gather_dtype: Literal["none", "bf16", "fp16"] = key("zero2, fsdp, hsdp: dtype of gathered parameters", "none")
    cpu_offload: bool = key("zero2, fsdp, hsdp: parameters, gradients and optimizer in host memory", False)

    expdir: Text = key("folder of all runs", "./logs")
    run_num: Text = key("name of this run: its folder is <expdir>/<config>/<run_num>", "00")
    resume: Literal["auto", "never"] = key("auto: continue the run found in the run folder", "auto")
    log_every: PositiveInt = key("iterations between two readings of the loss", 10)
    validate_every: PositiveInt = key("epochs between two validations", 1)
    checkpoint_every: PositiveInt = key("iterations between two checkpoints", 1000)
    keep_checkpoints: PositiveInt = key("newest checkpoints to keep, besides the best", 2)
    profile: Literal["none", "torch"] = key("record a window of steps with torch.profiler", "none")
    profile_start: NonNegativeInt = key("steps of this process before the window", 20)
    profile_steps: PositiveInt = key("steps in the window", 10)


# Settings that do not change what is computed: they may differ when a run is resumed.
FREE_KEYS = {
    "comm_timeout", "watchdog_timeout", "device", "expdir", "resume", "num_data_workers", "data_loader_config",
    "log_every", "checkpoint_every", "keep_checkpoints", "profile", "profile_start", "profile_steps",
    "gradient_accumulation", "activation_checkpointing", "checkpointing_interval", "data_parallel", "bucket_cap_mb",
    "dp_shard", "wrap_policy", "wrap_min_params", "prefetch", "cpu_offload",
}  # fmt: skip


def yaml():
    loader = YAML(typ="safe", pure=True)  # pure Python: the C parser is YAML 1.1, where 5e-4 is a string
    loader.default_flow_style = None
    loader.sort_base_mapping_type_on_output = False
    return loader


def load_config(argv=None, description=None, world_size=1):
    """Config from the command line: `--yaml_config FILE --config NAME` and any key of the schema.

    world_size: processes that share the batch. Raises UsageError naming file, config and key for whatever does not fit
    the schema, and where the batch cannot be shared equally.
    """
    options = _parse_command_line(sys.argv[1:] if argv is None else argv, description)
    path, name = options.pop("yaml_config"), options.pop("config")
    settings = {**read_named_config(path, name), **options}
    if "local_batch_size" in options and "global_batch_size" not in options:
        settings["global_batch_size"] = options["local_batch_size"] * world_size
    return check_config(settings, name, f"{path}: {name}", options, world_size)


def read_named_config(path, name):
    """The mapping of one named config of a YAML file, unchecked."""
    try:
        configs = yaml().load(Path(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(f"{path}: line {mark.line + 1 if mark else '?'}: {error.problem}") from None
    if not isinstance(configs, dict) or not all(isinstance(config, dict) for config in configs.values()):
        raise UsageError(f"{path}: expected named configs, each a mapping of keys to values")
    if name not in configs:
        raise UsageError(f"{path}: no config '{name}'{_nearest(name, configs)}; it has {', '.join(map(str, configs))}")
    return configs[name]


def check_config(settings, name, where, options=(), world_size=None):
    """Config from a mapping; `options` names the keys that came from the command line, for the message.

    world_size: None leaves unchecked how the batch is shared.
    """
    try:
        config = Config(config=name, **settings)
    except ValidationError as error:
        problems = sorted(error.errors(), key=lambda problem: problem["type"] == "missing")  # a misspelt key first
        raise UsageError(_explain(problems[0], where, options)) from None
    batch, own = config.global_batch_size, config.local_batch_size
    if world_size and own is not None and own * world_size != batch:
        raise UsageError(
            f"{where}: global_batch_size {batch} is not local_batch_size {own} x {world_size} devices: give one of them"
        )
    parts = (world_size or 1) * config.gradient_accumulation
    if world_size and batch % parts:
        accumulated = f" in {config.gradient_accumulation} micro-batches" if config.gradient_accumulation > 1 else ""
        raise UsageError(
            f"{where}: global_batch_size {batch} cannot be shared by {world_size} ranks{accumulated}: it is not a "
            f"multiple of {parts}"
        )
    if config.lr_scaling != "none" and config.base_batch_size is None:
        raise UsageError(f"{where}: lr_scaling {config.lr_scaling} needs base_batch_size, the batch that lr belongs to")
    _check_data_parallel(config, where)
    if config.enable_cuda_graphs and config.amp_mode == "fp16" and not config.enable_fused:
        raise UsageError(
            f"{where}: enable_cuda_graphs with amp_mode fp16 needs enable_fused: only then does the decision to skip a "
            "step stay on the device"
        )
    if config.warmup > config.num_iters:
        raise UsageError(f"{where}: warmup {config.warmup} is longer than num_iters {config.num_iters}")
    return config


def _check_data_parallel(config, where):
    sharded = config.data_parallel in ("zero2", "fsdp", "hsdp")
    defaults = Config.model_fields
    for names, belongs, to in (
        (("wrap_policy", "prefetch", "gather_dtype", "cpu_offload"), sharded, "zero2, fsdp and hsdp"),
        (("bucket_cap_mb",), not sharded, "ddp and zero1"),
        (("noddp", "gradient_compression"), config.data_parallel == "ddp", "ddp"),
        (("dp_shard",), config.data_parallel == "hsdp", "hsdp"),
    ):
        for name in names:
            if not belongs and getattr(config, name) != defaults[name].default:
                raise UsageError(f"{where}: {name} belongs to data_parallel {to}, not to {config.data_parallel}")


def write_config(config, path):
    """Write the resolved config as a YAML file that --yaml_config reads back."""
    with open(path, "w") as file:
        yaml().dump({config.config: config.model_dump(exclude={"config"})}, file)


def differing_keys(old, new):
    """Keys, in schema order, by which two configs would compute different things."""
    return [k for k in Config.model_fields if k not in FREE_KEYS and getattr(old, k) != getattr(new, k)]


def _explain(problem, where, options):
    """One line from one pydantic error."""
    name = str(problem["loc"][0])
    if name in options:
        where = "command line"
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key '{name}'{_nearest(name, Config.model_fields)}"
    if problem["type"] == "missing":
        return f"{where}: key '{name}' is missing ({Config.model_fields[name].description})"
    message = problem["msg"].removeprefix("Input ")
    return f"{where}: {name}: {problem['input']!r} {message}"


def _nearest(word, words):
    near = difflib.get_close_matches(str(word), [str(w) for w in words], n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _scalar(text):
    """A command-line word as YAML reads it: 16, 5e-4, true, null, text."""
    try:
        return yaml().load(text)
    except MarkedYAMLError:
        return text


def _parse_command_line(argv, description):
    parser = ArgumentParser(
        description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--yaml_config", default="config/ViT.yaml", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--config", default="base", metavar="NAME", help="named config in FILE, default: %(default)s")
    for name, field in Config.model_fields.items():
        if name == "config":
            continue
        kinds = get_args(field.annotation) or (field.annotation,)
        if field.annotation is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif str in kinds or any(isinstance(kind, str) for kind in kinds):
            how = {"metavar": "|".join(kinds) if isinstance(kinds[0], str) else "TEXT"}
        elif isinstance(field.annotation, type(list[int])):
            how = {"type": _scalar, "nargs": "+", "metavar": "X"}
        else:
            how = {"type": _scalar, "metavar": "X"}
        parser.add_argument(f"--{name}", help=field.description, **how)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        near = _nearest(word, [f"--{name}" for name in ("yaml_config", *Config.model_fields)])
        raise UsageError(f"command line: unknown option '{word}'{near}")
    return vars(options)
