"""Words of a command line: every field of Config is an option, and a value is read as the YAML file would read it."""

import argparse
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from utils.errors import ArgumentParser, UsageError, nearest
from utils.schema import ALIASES, Config
from utils.yaml_files import parse_yaml

# Options of programs that users come from, and what takes their place here. docs/coming_from.md is the page of it.
BATCH = "--global_batch_size (of all devices) or --local_batch_size (of one device)"

OF_TUTORIALS = {  # NERSC's deep learning at scale
    "batch_size": BATCH,
    "enable_apex": "--enable_fused (torch's own fused optimizer)",
    "enable_benchy": "python benchmark.py data",
    "enable_manual_profiling": "ENABLE_PROFILING=1 (Nsight Systems) or --profile torch",
    "enable_amp": "--amp_mode bf16, or fp16",
    "num_epochs": "--num_iters",
    "use_shifter": "CONTAINER=shifter IMAGE=... in the environment (docs/launch.md)",
}

OF_DEEPSPEED = {
    "deepspeed": "--data_parallel zero1, zero2 or fsdp (stages 1, 2, 3)",
    "deepspeed_config": "--yaml_config and --config; docs/coming_from.md has the keys",
    "zero_stage": "--data_parallel zero1, zero2 or fsdp (stages 1, 2, 3)",
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": "--local_batch_size with --gradient_accumulation",
    "gradient_accumulation_steps": "--gradient_accumulation",
    "gradient_clipping": "--clip_grad_norm",
    "reduce_bucket_size": "--bucket_cap_mb, in MiB",
    "offload_optimizer": "--cpu_offload",
    "offload_param": "--cpu_offload",
}

OF_MEGATRON = {
    "tensor-model-parallel-size": "train_mp.py --tensor_parallel",
    "pipeline-model-parallel-size": "train_mp.py --pipeline_parallel",
    "context-parallel-size": "train_mp.py --context_parallel",
    "cp-comm-type": "--cp_method gather, ring or all_to_all",
    "sequence-parallel": "--sequence_parallel",
    "num-layers-per-virtual-pipeline-stage": "--pp_schedule interleaved",
    "use-distributed-optimizer": "--data_parallel zero1",
    "overlap-grad-reduce": "no option: reductions always run beside the backward pass",
    "micro-batch-size": "--local_batch_size with --gradient_accumulation",
    "global-batch-size": "--global_batch_size",
    "recompute-granularity": "--activation_checkpointing full or selective",
    "recompute-activations": "--activation_checkpointing selective",
    "clip-grad": "--clip_grad_norm",
    "train-iters": "--num_iters",
    "save": "--expdir and --run_num: a run keeps its checkpoints, and goes on from them",
    "load": "--expdir and --run_num: a run keeps its checkpoints, and goes on from them",
    "save-interval": "--checkpoint_every",
    "log-interval": "--log_every",
    "bf16": "--amp_mode bf16",
    "fp16": "--amp_mode fp16",
    "hidden-size": "--embed_dim",
    "num-layers": "--depth",
    "num-attention-heads": "--num_heads",
    "enable-cuda-graph": "--enable_cuda_graphs",
}

OF_FSDP = {
    "sharding_strategy": "--data_parallel: fsdp is FULL_SHARD, zero2 SHARD_GRAD_OP, hsdp HYBRID_SHARD",
    "backward_prefetch": "--prefetch, in units",
    "auto_wrap_policy": "--wrap_policy block, size or none",
    "state_dict_type": "no option: a checkpoint is read by every layout, and a run ends with one file of weights",
    "nproc_per_node": "torchrun --nproc_per_node, in front of the script",
}

ELSEWHERE = OF_TUTORIALS | OF_DEEPSPEED | OF_MEGATRON | OF_FSDP


# The keys that a learner changes first, at the top of --help.
FIRST_KEYS = (
    "num_iters",
    "global_batch_size",
    "lr",
    "device",
    "amp_mode",
    "data_parallel",
    "tensor_parallel",
    "domain_parallel",
    "run_num",
    "profile",
)
# Sections of --help after these, by the key of the schema with which each begins.
SECTIONS = {
    "task": "task and model",
    "img_size": "images, channels and data",
    "global_batch_size": "training",
    "comm_timeout": "patience",
    "device": "speed and memory",
    "data_parallel": "data parallel (rung 2)",
    "tensor_parallel": "model and domain parallel (rungs 3 and 4)",
    "expdir": "folders, logs, checkpoints, profiles",
}


def parse_command_line(
    argv: Sequence[str],
    description: str | None,
    yaml_config: str,
) -> dict[str, Any]:
    """{option: value} of the words of a command line, `yaml_config` and `config` always. Raises UsageError."""
    parser = ArgumentParser(
        usage="%(prog)s [--config NAME] [options]",  # a hundred options in brackets tell nothing
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    first = parser.add_argument_group("first of all")
    first.add_argument("--config", default="base", metavar="NAME", help="named config in FILE, default: %(default)s")
    first.add_argument("--yaml_config", default=yaml_config, metavar="FILE", help="default: %(default)s")
    fields = Config.model_fields
    for name in FIRST_KEYS:
        _add_option(first, name, fields[name])
    section = first
    for name, field in fields.items():
        if name in SECTIONS:
            section = parser.add_argument_group(SECTIONS[name])
        if name != "config" and name not in FIRST_KEYS:
            _add_option(section, name, field)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        # The first unknown word is the one that is explained.
        word = unknown[0].split("=")[0]
        instead = ELSEWHERE.get(word.lstrip("-"))
        if instead:
            raise UsageError(f"command line: there is no '{word}' here: use {instead}")
        near = nearest(word, [f"--{name}" for name in ("yaml_config", *Config.model_fields)])
        raise UsageError(f"command line: unknown option '{word}'{near}")
    return vars(options)


def option_words(key: str, value: Any) -> list[str]:
    """The words of a command line that give a key this value: what parse_command_line reads back."""
    # argparse has two options for a switch.
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    text = "null" if value is None else value
    return [f"--{key}={text}"]


def choices(key: str) -> tuple[str, ...]:
    """The values that a key may have, where the schema lists them."""
    return get_args(Config.model_fields[key].annotation)


def _add_option(section: Any, name: str, field: FieldInfo) -> None:
    """Add the option of a key, and its further spellings, to a section of --help."""
    flags = [f"--{spelling}" for spelling in (name, *ALIASES.get(name, ()))]
    how = _how_to_read(field)
    section.add_argument(*flags, dest=name, help=field.description, **how)


def _how_to_read(field: FieldInfo) -> dict[str, Any]:
    """The arguments of add_argument that follow from the type of a field of the schema."""
    kinds = get_args(field.annotation) or (field.annotation,)
    is_choice = isinstance(kinds[0], str)
    is_text = str in kinds or any(isinstance(kind, str) for kind in kinds)
    if field.annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(field.annotation) is dict:
        return {"type": _scalar, "metavar": "{KEY: VALUE}"}
    if is_text:
        return {"metavar": "|".join(kinds) if is_choice else "TEXT"}
    if isinstance(field.annotation, type(list[int])):
        may_be_empty = field.default == []
        return {"type": _scalar, "nargs": "*" if may_be_empty else "+", "metavar": "X"}
    return {"type": _scalar, "metavar": "X"}


def _scalar(text: str) -> Any:
    """A command-line word as YAML reads it: 16, 5e-4, true, null, text."""
    try:
        return parse_yaml(text)
    except ValueError:
        return text
