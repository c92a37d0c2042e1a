"""The schema of a run's settings: every key of a config file and option of the command line, its type and meaning."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from utils.choices import LOSSES, OPTIMIZERS, LossKind, OptimizerKind, choose
from utils.layout import ORDER, Layout, tile_counts

MOST = 2**31 - 1
# Names of folders inside others.
Name = Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$", max_length=200)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e38)]
# What is made in memory, or counted through, has narrower bounds: numbers beyond them are slips of the hand.
Size = Annotated[int, Field(ge=1, le=2**16)]  # of a model's part
Ranks = Annotated[int, Field(ge=1, le=2**20)]
Seconds = Annotated[int, Field(ge=1, le=10**7)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
MOST_STEPS = 1000  # of a forecast in training
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Members = Annotated[int, Field(ge=1, le=1024)]
Frames = Annotated[int, Field(ge=1, le=64)]
Stage = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]
Method = Literal["gather", "ring", "all_to_all"]
if TYPE_CHECKING:
    OptimizerName: TypeAlias = str
    LossName: TypeAlias = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    LossName = Literal[tuple(LOSSES)]
TIMED_FORCINGS = ("hour", "day")  # the local hour, the day of the year: a cosine and a sine of each

Affects = Literal["model", "result", "training", "layout", "speed", "nothing"]
Options = TypeVar("Options")


def spell_optimizer(name: Any) -> Any:
    """The name of an optimizer as the schema has it: muon -> Muon. Anything else stays as it is."""
    if not isinstance(name, str):
        return name
    names = {known.lower(): known for known in OPTIMIZERS}
    return names.get(name.lower(), name)


def key(
    description: str,
    default: Any = ...,
    affects: Affects = "result",
    **bounds: Any,
) -> Any:
    """A field of the schema: its meaning, its default (none where it must be given), what it affects, and its bounds.

    affects:
    - model: what the weights mean. Another value is another model, or another task.
    - result: the numbers that training and forecasts give.
    - training: the numbers that training gives; a forecast does not ask.
    - layout: how work is shared among ranks and what is computed twice, not the numbers.
    - speed: how fast it runs and what is recorded of that, not the numbers.
    - nothing: names, folders, patience, and how often something is written.

    A run can be resumed with other values of the last three.
    """
    return Field(default, description=description, json_schema_extra={"affects": affects}, **bounds)


def keys_that_affect(*what: Affects) -> list[str]:
    """The names of the keys that affect one of these, in schema order."""
    # Every key says itself what it affects.
    fields: dict[str, Any] = Config.model_fields
    return [name for name, field in fields.items() if field.json_schema_extra["affects"] in what]


def count_forcings(names: Sequence[str]) -> tuple[int, int]:
    """(channels that stay the same, channels that change with the date) of the forcings of these names."""
    timed = sum(name in TIMED_FORCINGS for name in names)
    return len(names) - timed, 2 * timed


class Config(BaseModel):
    """The schema. Types are strict: a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    config: Name = key("name of the configuration in the YAML file", affects="nothing")

    task: Text = key("forecast: weather; classify: images; transport: images, volumes", "forecast", "model")
    model: Text = key("vit, unet, afno, neighborhood, classifier, or package.module:Class", "vit", "model")
    model_args: dict[str, Any] = key("further arguments of the model's class: {kernel_size: 3}", {}, "model")
    num_classes: PositiveInt | None = key("classes of the classifier", None, "model")
    embed_dim: Size = key("embedding size", affects="model")
    depth: Size = key("number of transformer blocks", affects="model")
    num_heads: Size = key("attention heads", affects="model")
    mlp_ratio: float = key("hidden size of the MLP / embedding size", affects="model", gt=0, le=2**10)
    patch_size: Size = key("grid points along one side of a patch", affects="model")
    dropout: float = key("dropout probability", 0.0, "training", ge=0, lt=1)

    img_size: list[Size] = key("points: latitude longitude", affects="model", min_length=2, max_length=3)
    n_in_channels: Size = key("channels of the input, the first ones of the file", affects="model")
    n_out_channels: Size = key("channels to forecast, the first ones of the file", affects="model")
    input_frames: Frames = key("frames of the input: the present one, then one dt earlier, ...", 1, "model")
    dt: PositiveInt = key("forecast lead, in time steps of the file", affects="model")
    forcings: list[Name] = key(
        "further inputs: hour (local), day (of the year), latitude, or fields of the files: orography", [], "model",
        max_length=64,
    )  # fmt: skip
    predict: Literal["state", "change"] = key("what the network gives: the next state, or the change", "state", "model")
    train_data_path: Text = key("folder of the training years (.h5), or a store: gs://BUCKET/STORE.zarr#1979-2015")
    valid_data_path: Text = key("folder of the validation years, or a store")
    inf_data_path: Text = key("folder of the test years, or a store")
    cache_to: Text | None = key("keep chunks of remote stores here, on a disk of the node: $TMPDIR", None, "speed")
    cache_gib: PositiveFloat = key("GiB that cache_to may take on each node", 50, "speed")
    retry_seconds: Seconds = key("seconds for which a lost connection to a remote store is retried", 60, "nothing")
    global_means_path: Text = key("mean of each channel (.npy)")
    global_stds_path: Text = key("standard deviation of each channel (.npy)")
    time_means_path: Text = key("time mean of each channel at each point (.npy), the climatology")
    limit_nsamples: PositiveInt | None = key("train on the first samples only", None)
    limit_nsamples_val: PositiveInt | None = key("validate on the first samples only", None)
    check_data: Literal["off", "sample", "all"] = key(
        "look at the data before training: ranges, dates, statistics; some frames of every year, or all frames",
        "sample",
        "nothing",
    )
    data_loader_config: Literal["pytorch", "dali"] = key("data loader: native or NVIDIA DALI", "pytorch", "speed")
    num_data_workers: int = key("threads (DALI: processes) that read ahead; 0: none", 0, "speed", ge=0, le=256)

    global_batch_size: PositiveInt = key("samples of one optimizer step, over all devices")
    local_batch_size: PositiveInt | None = key("samples of one step on one device; sets global_batch_size", None)
    num_iters: PositiveInt = key("optimizer steps of the whole run")
    optimizer: Annotated[OptimizerName, BeforeValidator(spell_optimizer)] = key(
        "Adam, AdamW, or Muon for the matrices of hidden layers and AdamW for the rest"
    )
    gradient_accumulation: PositiveInt = key("micro-batches of one optimizer step on each device", 1, "layout")
    micro_batch_size: PositiveInt | None = key("elastic: at most; null: that of the first start", None, "layout")
    lr: PositiveFloat = key("peak learning rate, of base_batch_size where it is scaled")
    lr_scaling: Literal["none", "linear", "sqrt"] = key("how lr grows with global_batch_size / base_batch_size", "none")
    base_batch_size: PositiveInt | None = key("global batch for which lr was chosen", None)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = key("Adam betas", min_length=2, max_length=2)
    muon_momentum: float = key("Muon: momentum of the gradients of matrices", 0.95, "training", ge=0, lt=1)
    muon_weights: list[Text] = key(
        "Muon: its matrices, by names; !: not these", ["*", "!*embed*", "!*head*"], "training", max_length=64
    )
    weight_decay: Weight | None = key(
        "a step takes lr * weight_decay of a weight away, no norms, biases, positions; null: 0 (AdamW: 0.01, of all)",
        None,
        "training",
    )
    weight_decay_all: bool = key("weight_decay of norms, biases and position embeddings too", False, "training")
    lr_schedule: Literal["cosine", "constant"] = key("learning rate after the warmup")
    warmup: NonNegativeInt = key("iterations of linear warmup, at most half of num_iters", 0)
    clip_grad_norm: PositiveFloat | None = key("clip gradients to this global norm", None)
    ema: float | None = key("validate and forecast with averaged weights: decay, 0.999", None, "training", ge=0, lt=1)
    init_from: Text | None = key(
        "start with the weights of this run or checkpoint, or of a file of another program",
        None,
        "training",
    )
    init_map: Text | None = key("init_from FILE: YAML of regular expressions, its names -> ours", None, "training")
    init_missing: Literal["error", "draw"] = key(
        "init_from FILE: weights that it lacks are an error, or drawn as without it", "error", "training"
    )
    freeze: list[Text] = key(
        "weights that are not trained, by names: ['backbone.*']; '!*lora*': but these", [], "training"
    )
    seed: NonNegativeInt = key("seed of weights, sample order and dropout", 0)
    loss: LossName = key(
        "of forecasts: of whole images, of channels and points by their weights, or that of an ensemble",
        "relative_l2",
        "training",
    )
    channel_weights: dict[Name, Weight] = key("weights of channels, else 1: {u10: 0.1}", {}, "training")
    pressure_weights: bool = key("channels weigh as the pressure of their level", False, "training")
    ensemble_size: Members = key("crps: members of a sample, forecasts that differ by noise", 1, "training")
    noise_features: Size = key("ensembles: numbers of the noise of a member in a step", 16, "model")
    noise_correlation: float = key(
        "ensembles: of a member's noise with that of the step before, 0: new in each, 1: the same",
        0,
        ge=0,
        le=1,
    )
    crps_alpha: float = key("crps: 1: fair; less: almost fair, members may not agree", 0.95, "training", ge=0, le=1)
    rollout_steps: Steps = key("steps of a forecast to train over, each from the one before", 1, "training")
    rollout_schedule: list[Stage] = key("later rollout_steps: [600, 2] [900, 4]: 2 from 600 on, then 4", [], "training")

    elastic: bool = key("ranks may come and go: those that cannot share the batch equally wait", False, "layout")
    comm_timeout: Seconds = key("seconds after which a rank that waits for another gives up", 600, "nothing")
    watchdog_timeout: Seconds = key("seconds without a finished step after which the run ends", 1800, "nothing")

    device: Text = key("auto, cpu, cuda, cuda:1, mps, ...", "auto", "speed")
    amp_mode: Literal["none", "bf16", "fp16", "fp8"] = key("automatic mixed precision", "none")
    enable_fused: bool = key("fused optimizer kernel", False)
    enable_jit: bool = key("torch.compile the model", False, "training")
    enable_cuda_graphs: bool = key("the whole step as one CUDA graph", False, "training")
    enable_tf32: bool = key("TF32 in float32 matrix products and convolutions on a GPU", False)
    enable_channels_last: bool = key("channels-last memory format in convolutions", False)
    deterministic: bool = key("the same numbers in every repetition on GPUs, by slower kernels", False, "training")
    activation_checkpointing: Literal["none", "full", "selective", "step"] = key(
        "recompute in the backward pass: whole blocks, all but matrix products and attention, or steps of a rollout",
        "none", "layout",
    )  # fmt: skip
    checkpointing_interval: Size = key("recompute only every k-th block", 1, "layout")

    data_parallel: Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"] = key("what its ranks share", "ddp", "layout")
    noddp: bool = key("no gradient reduction: to measure what it costs; ranks train apart", False, "training")
    bucket_cap_mb: PositiveFloat = key("ddp, zero1: MiB of gradients in one reduction", 25, "layout")
    sync_batchnorm: bool = key("BatchNorm over the global batch, not over each rank's samples", False, "training")
    gradient_compression: Literal["none", "bf16"] = key("ddp: reduce gradients in bfloat16", "none", "training")
    dp_shard: Ranks | None = key("hsdp: ranks that share one copy; null: those of a node", None, "layout")
    wrap_policy: Literal["block", "size", "none"] = key("zero2, fsdp, hsdp: a unit to gather", "block", "layout")
    wrap_min_params: PositiveInt = key("parameters of a unit with wrap_policy size", 1_000_000, "layout")
    prefetch: int = key("zero2, fsdp, hsdp: units gathered ahead; 0: torch's own choice", 0, "layout", ge=0, le=999)
    gather_dtype: Literal["none", "bf16", "fp16"] = key("zero2, fsdp, hsdp: of gathered parameters", "none", "training")
    cpu_offload: bool = key("zero2, fsdp, hsdp: parameters, gradients and optimizer in host memory", False, "layout")

    tensor_parallel: Ranks = key("train_mp, train_shard: ranks that share heads and hidden features (tp)", 1, "layout")
    context_parallel: Ranks = key("train_mp: ranks that share the tokens of an image (cp)", 1, "layout")
    pipeline_parallel: Ranks = key("train_mp: ranks that share the blocks (pp)", 1, "layout")
    domain_parallel: Ranks | Text = key("train_shard: ranks of an image, bands (4) or tiles (2x2)", 1, "layout")
    ensemble_parallel: Ranks = key("ranks that share the members of a sample (ens)", 1, "layout")
    parallel_order: Text = key("which dimension's neighbours are adjacent ranks", ORDER, "layout")
    tp_backend: Literal["native", "dtensor"] = key("train_mp: our layers, or parallelize_module", "native", "layout")
    sequence_parallel: bool = key("train_mp: norms and dropout of tp ranks on a slice of the tokens", False, "layout")
    cp_method: Method = key("context parallel: how attention sees all tokens", "gather", "layout")
    domain_method: Method = key("domain parallel: how attention sees all tokens", "gather", "layout")
    domain_fallback: Literal["error", "gather"] = key(
        "domain parallel: an operation that no rule computes is an error, or runs on whole tensors", "error", "layout"
    )
    pp_schedule: Literal["gpipe", "1f1b", "interleaved"] = key("pipeline: order of micro-batches", "1f1b", "layout")

    expdir: Text = key("folder of all runs", "./logs", "nothing")
    run_num: Name = key("name of this run: <expdir>/<config>/<run_num>; auto: the next free number", "00", "nothing")
    log_every: PositiveInt = key("iterations between two readings of the loss", 10, "nothing")
    tracker: Literal["none", "mlflow", "wandb"] = key("where the run is told beside TensorBoard", "none", "nothing")
    validate_every: PositiveInt = key("epochs between two validations", 1, "result")
    checkpoint_every: PositiveInt = key("iterations between two checkpoints", 1000, "nothing")
    keep_checkpoints: Size = key("newest checkpoints to keep, besides the best", 2, "nothing")
    profile: Literal["none", "torch", "ranks"] = key(
        "record a window of steps with torch.profiler: torch on rank 0, ranks on all of them", "none", "speed"
    )
    profile_start: NonNegativeInt = key("steps of this process before the window", 20, "speed")
    profile_steps: PositiveInt = key("steps in the window", 10, "speed")

    @property
    def state_channels(self) -> int:
        """Channels of the frames that the model takes: those of the present one first."""
        return self.input_frames * self.n_in_channels

    @property
    def model_in_channels(self) -> int:
        """Channels that the model takes: those of its frames and the forcings of one step."""
        return self.state_channels + sum(count_forcings(self.forcings))

    @property
    def noise_of_model(self) -> int:
        """Numbers of the noise that the model takes beside an image; 0 where it takes none."""
        return self.noise_features if self.ensemble_size > 1 else 0

    @property
    def optimizer_kind(self) -> OptimizerKind:
        """What the program must know of the optimizer."""
        return choose("optimizer", self.optimizer, OPTIMIZERS)

    @property
    def loss_kind(self) -> LossKind:
        """What the program must know of the loss."""
        return choose("loss", self.loss, LOSSES)

    @property
    def rollout_stages(self) -> tuple[tuple[int, int], ...]:
        """(first iteration, steps of the forecasts), in order, for every stage that num_iters reaches."""
        # A stage that begins after the last iteration is no stage of this run.
        later = [(first, steps) for first, steps in self.rollout_schedule if first < self.num_iters]
        return (0, self.rollout_steps), *later

    def forecast_steps(self, first: int, last: int) -> int:
        """Steps of the forecasts that the iterations [first, last) train over, of one sample."""
        starts = [start for start, _ in self.rollout_stages]
        ends = [*starts[1:], last]
        count = 0
        for (start, steps), end in zip(self.rollout_stages, ends, strict=True):
            iterations = min(last, end) - max(first, start)  # in this stage, below zero where it is not reached
            count += max(0, iterations) * steps
        return count

    @property
    def longest_rollout(self) -> int:
        """The most steps of a forecast that is trained."""
        return max(steps for _, steps in self.rollout_stages)

    def options(self, kind: Callable[..., Options]) -> Options:
        """A dataclass whose fields are named as keys of this config, filled from them: DataParallelOptions, ..."""
        # Keys of the schema and fields of the dataclass have the same names.
        fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]  # a dataclass, which has no type of its own
        return kind(**{field.name: getattr(self, field.name) for field in fields})

    def _split_sizes(self) -> tuple[tuple[int, int, int], tuple[int, int], int]:
        """Ranks that share a model and its samples: (tp, cp, pp), along each axis of an image, and of an ensemble."""
        sizes = self.tensor_parallel, self.context_parallel, self.pipeline_parallel
        rows, columns = tile_counts(self.domain_parallel)
        return sizes, (rows, columns), self.ensemble_parallel

    @property
    def smallest_layout(self) -> Layout:
        """The layout without data parallelism."""
        sizes, domain, ens = self._split_sizes()
        ranks = math.prod((*sizes, *domain, ens))
        return Layout(ranks, *sizes, order=self.parallel_order, domain=domain, ens=ens)

    def layout(self, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """How these ranks are split. Raises UsageError where the numbers do not fit.

        ranks_per_node: hsdp shards the parameters inside a node, unless dp_shard says otherwise.
        """
        sizes, domain, ens = self._split_sizes()
        whole = Layout(world_size, *sizes, order=self.parallel_order, domain=domain, ens=ens)
        if self.data_parallel != "hsdp":
            return whole
        # Of the ranks of a node, those with the same part of a model can share one copy of its parameters.
        ranks_inside = math.gcd(ranks_per_node or whole.dp, world_size)
        ranks_of_model = math.prod((*sizes, *domain, ens))
        dp_inside = max(1, ranks_inside // ranks_of_model)
        shard = self.dp_shard or math.gcd(dp_inside, whole.dp)
        return Layout(world_size, *sizes, shard, self.parallel_order, domain, ens)


ALIASES = {"tensor_parallel": ["row_parallel_size"]}  # other names of an option
