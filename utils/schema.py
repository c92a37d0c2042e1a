"""The schema of a run's settings: every key of a config file and option of the command line, its type and meaning."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from utils.layout import ORDER, Layout, tile_counts

Text = Annotated[str, Field(min_length=1)]


def key(description: str, default: Any = ...) -> Any:
    """A field of the schema: what it means and its default, none where it must be given."""
    return Field(default, description=description)


class Config(BaseModel):
    """The schema. Types are strict: a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    config: Text = key("name of the configuration in the YAML file")

    model: Literal["forecast", "classifier"] = key("forecast: image to image; classifier: image to class", "forecast")
    num_classes: PositiveInt | None = key("classes of the classifier", None)
    embed_dim: PositiveInt = key("embedding size")
    depth: PositiveInt = key("number of transformer blocks")
    num_heads: PositiveInt = key("attention heads")
    mlp_ratio: PositiveFloat = key("hidden size of the MLP / embedding size")
    patch_size: PositiveInt = key("grid points along one side of a patch")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability")

    img_size: Annotated[list[PositiveInt], Field(min_length=2, max_length=3)] = key("points: latitude longitude")
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

    tensor_parallel: PositiveInt = key("train_mp, train_shard: ranks that share heads and hidden features (tp)", 1)
    context_parallel: PositiveInt = key("train_mp: ranks that share the tokens of an image (cp)", 1)
    pipeline_parallel: PositiveInt = key("train_mp: ranks that share the blocks (pp)", 1)
    domain_parallel: PositiveInt | Text = key(
        "train_shard: ranks that share an image, as bands of latitude (4) or tiles (2x2)", 1
    )
    parallel_order: Text = key("which dimension's neighbours are adjacent ranks", ORDER)
    tp_backend: Literal["native", "dtensor"] = key("train_mp: tp by our layers, or by parallelize_module", "native")
    sequence_parallel: bool = key("train_mp: norms and dropout of tp ranks on a slice of the tokens", False)
    cp_method: Literal["gather", "ring", "all_to_all"] = key(
        "context parallel: how attention sees all tokens", "gather"
    )
    domain_method: Literal["gather", "ring", "all_to_all"] = key(
        "domain parallel: how attention sees all tokens", "gather"
    )
    pp_schedule: Literal["gpipe", "1f1b", "interleaved"] = key("order of the micro-batches in the pipeline", "1f1b")

    expdir: Text = key("folder of all runs", "./logs")
    run_num: Text = key("name of this run: its folder is <expdir>/<config>/<run_num>", "00")
    resume: Literal["auto", "never"] = key("auto: continue the run found in the run folder", "auto")
    log_every: PositiveInt = key("iterations between two readings of the loss", 10)
    validate_every: PositiveInt = key("epochs between two validations", 1)
    checkpoint_every: PositiveInt = key("iterations between two checkpoints", 1000)
    async_save: bool = key("write checkpoints while training goes on", True)
    keep_checkpoints: PositiveInt = key("newest checkpoints to keep, besides the best", 2)
    profile: Literal["none", "torch"] = key("record a window of steps with torch.profiler", "none")
    profile_start: NonNegativeInt = key("steps of this process before the window", 20)
    profile_steps: PositiveInt = key("steps in the window", 10)

    def layout(self, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """How these ranks are split. Raises UsageError where the numbers do not fit.

        ranks_per_node: hsdp shards the parameters inside a node, unless dp_shard says otherwise.
        """
        sizes = self.tensor_parallel, self.context_parallel, self.pipeline_parallel
        domain = tile_counts(self.domain_parallel)
        whole = Layout(world_size, *sizes, order=self.parallel_order, domain=domain)
        if self.data_parallel != "hsdp":
            return whole
        inside = max(1, math.gcd(ranks_per_node or whole.dp, world_size) // math.prod((*sizes, *domain)))
        return Layout(world_size, *sizes, self.dp_shard or math.gcd(inside, whole.dp), self.parallel_order, domain)


ALIASES = {"tensor_parallel": ["row_parallel_size"]}  # other names of an option

# Settings that do not change what is computed: they may differ when a run is resumed.
FREE_KEYS = {
    "comm_timeout", "watchdog_timeout", "device", "expdir", "resume", "num_data_workers", "data_loader_config",
    "log_every", "checkpoint_every", "keep_checkpoints", "async_save", "profile", "profile_start", "profile_steps",
    "gradient_accumulation", "activation_checkpointing", "checkpointing_interval", "data_parallel", "bucket_cap_mb",
    "dp_shard", "wrap_policy", "wrap_min_params", "prefetch", "cpu_offload", "tensor_parallel", "context_parallel",
    "pipeline_parallel", "parallel_order", "tp_backend", "sequence_parallel", "cp_method", "pp_schedule",
    "domain_parallel", "domain_method",
}  # fmt: skip
