"""Layouts of rung 3 x model sizes on this machine: time of a step, memory of a rank, messages beside their minimum.

All layouts train with the same whole batch of random numbers (strong scaling). The ranks of every number are there at
once and hold every case at once; all take turns in every round, and the time of a step is given as the ratio to one
rank with the whole batch, in the same round.

What a step has to send at least (`predicted_messages`), in numbers that one rank sends. b, n: samples and tokens of
this rank, D features, a block has 12 D^2 weights; t, c, p, d ranks of tp, cp, pp, dp; m micro-batches; P parameters
that this rank holds. An all-reduce of S numbers is worth 2 (t-1)/t S, an all-gather or a reduce-scatter (t-1)/t S.

| | forward | backward |
|---|---|---|
| tensor | 2 all-reduces of b n D a block | the same |
| sequence | 2 all-gathers, 2 reduce-scatters of b n D a block: the same numbers; 1 all-gather at the end | the same |
| context, gather | 1 all-gather a block: 2 (c-1) b n D / t | 1 reduce-scatter: the same |
| context, ring | c-1 exchanges a block: the same as gather | 2 (c-1) exchanges: twice that |
| context, all_to_all | 2 all-to-alls a block: 4 (c-1)/c b n D / t | the same |
| context, the loss | 1 all-reduce of 2 b numbers | nothing |
| pipeline | b n D for each boundary of stages, in m messages | the same |
| gradients | with fsdp, all-gathers of P | 1 reduction of P over the d c ranks that share parameters |

With sequence parallelism the gradients of norms and shared biases, (6 L + 2) D numbers, are added up once a step too.
"""

import math
import re
import statistics
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from distributed.collectives import shard_sizes
from distributed.context_parallel import latitude_band
from distributed.counting import CollectiveCounter
from distributed.data_parallel import SHARDED, data_parallel, sharded_units
from distributed.model_parallel import split_model
from utils import comm
from utils.benchmarks import team
from utils.benchmarks.data_parallel import MIB, predicted_bytes
from utils.benchmarks.memory import SavedTensors, memory_of_a_step, nbytes, predicted_memory
from utils.benchmarks.report import format_table, machine, write_json
from utils.compute import apply_compute_options
from utils.config import load_config
from utils.device import select_device
from utils.errors import UsageError, reported_as_usage_error
from utils.files import whole_file
from utils.launch import read_launch
from utils.layout import Layout
from utils.model import build_model, initial_weights
from utils.optim import build_optimizer
from utils.schema import Config
from utils.training_step import TrainingStep

LAYOUTS = (
    "tp2", "tp2,sequence_parallel", "cp2", "cp2,cp_method=ring", "cp2,cp_method=all_to_all", "pp2",
    "tp4", "cp4", "tp2xcp2", "tp2xpp2", "tp2xdp2", "tp2xdp2,data_parallel=fsdp", "cp2xdp2,data_parallel=fsdp",
)  # fmt: skip
ONE = "one rank"
YAML = "config/mp.yaml"
PHASES = ("forward", "backward", "update")
HELD = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    config: Config
    layout: Layout


def run(words, layouts=LAYOUTS, embed_dims=(), steps=2, rounds=3, json_path=None, png_path=None):
    """Measure and print three tables: time, memory, messages.

    words: options of the config. layouts: sizes joined by x, as tp2xdp2, with options of their own after commas:
    'cp4,cp_method=ring'. embed_dims: model sizes; none: that of the config. steps: timed in one turn.
    Raises UsageError for what cannot be run, before anything is timed, and where a rank fails.
    """
    if min(steps, rounds, *embed_dims) < 1:
        raise UsageError("--embed_dims, --steps and --rounds are 1 or more")
    if read_launch().world_size > 1:
        raise UsageError("benchmark.py mp starts its ranks itself: start it with plain python, in one process")
    cases = [
        case for own in ([f"--embed_dim={n}"] for n in embed_dims) for case in build_cases([*words, *own], layouts)
    ]
    cases = cases or build_cases(words, layouts)
    config, sizes = cases[0].config, sorted({case.layout.world_size for case in cases})
    device = select_device(config.device)
    if device.type != "cpu" and sizes[-1] > torch.accelerator.device_count():
        raise UsageError(
            f"{sizes[-1]} ranks need as many devices; this machine has {torch.accelerator.device_count()} "
            f"({device.type}): give smaller --layouts, or --device cpu"
        )
    with ExitStack() as stack:
        teams = {}
        for size in sizes:
            own = [case for case in cases if case.layout.world_size == size]
            teams[size] = stack.enter_context(Ranks(size, own)), own
        turns = [
            {case: ranks.turn(i, steps) / steps for ranks, own in teams.values() for i, case in enumerate(own)}
            for _ in range(rounds)
        ]
        figures = {case: one for ranks, own in teams.values() for case, one in zip(own, ranks.figures, strict=True)}
    yardstick = {case.config.embed_dim: case for case in cases if case.name == ONE}
    results = [
        summarize(case, figures[case], [(turn[case], turn[yardstick[case.config.embed_dim]]) for turn in turns])
        for case in cases
    ]
    print_tables(results)
    print(
        f"{config.depth} blocks, {math.prod(grid(config)):,} tokens, batch {config.global_batch_size} over all ranks, "
        f"{rounds} rounds of {steps} steps; "
        f"{device.type}{', one thread per rank: more ranks than cores share them' if device.type == 'cpu' else ''}"
    )
    summary = {
        "config": config.config, "machine": machine(device), "global_batch_size": config.global_batch_size,
        "depth": config.depth, "tokens": math.prod(grid(config)), "rows": results,
    }  # fmt: skip
    if json_path:
        write_json(json_path, summary)
    if png_path:
        write_picture(png_path, [r for r in results if r["embed_dim"] == results[-1]["embed_dim"]])
    return summary


def build_cases(words, layouts):
    """The cases of a model size, checked; the first is the yardstick, one rank."""
    words = ["--config=mp_quick", *words]
    one = load_config(words, yaml_config=YAML, model_parallel=True)
    cases = [Case(ONE, one, one.layout(1))]
    for text in dict.fromkeys(layouts):
        name, *own = text.split(",")
        sizes = parse_layout(name)
        ranks, pp = math.prod(sizes.values()), sizes["pp"]
        split = [
            f"--tensor_parallel={sizes['tp']}", f"--context_parallel={sizes['cp']}", f"--pipeline_parallel={pp}",
            f"--global_batch_size={one.global_batch_size}",
        ]  # fmt: skip
        parts = [f"--gradient_accumulation={2 * pp}"] if pp > 1 else []  # unless the words say otherwise
        every = [*parts, *words, *split, *(f"--{option}" for option in own)]
        config = load_config(every, world_size=ranks, yaml_config=YAML, model_parallel=True)
        # hsdp without dp_shard: half of the ranks share one copy, as on two nodes
        cases.append(Case(text, config, config.layout(ranks, max(1, ranks // 2))))
    for case in cases:
        build_model(case.config)  # its sizes fit
    return cases


def parse_layout(name):
    """Sizes of a layout: 'tp2xdp2' -> {'tp': 2, 'cp': 1, 'pp': 1, 'dp': 2}."""
    parts = [re.fullmatch(r"(tp|cp|pp|dp)([1-9]\d*)", part) for part in name.split("x")]
    if not all(parts) or len({part[1] for part in parts}) < len(parts):
        raise UsageError(f"layout '{name}': expected sizes of tp, cp, pp, dp joined by x, as tp4 or tp2xcp2xdp2")
    sizes = dict.fromkeys(("tp", "cp", "pp", "dp"), 1) | {part[1]: int(part[2]) for part in parts}
    if math.prod(sizes.values()) == 1:
        raise UsageError(f"layout '{name}': it has one rank, which is measured anyway")
    return sizes


# ---- theory


def grid(config):
    """Rows and columns of patches."""
    return [points // config.patch_size for points in config.img_size]


def local_parameters(config, layout):
    """Parameters of the rank that holds most, before data parallelism: split over tp and pp, whole over cp."""
    d, patch, hidden = config.embed_dim, config.patch_size**2, int(config.embed_dim * config.mlp_ratio)
    split = 4 * d * d + 2 * d * hidden + 3 * d + hidden  # qkv, proj, fc1, fc2 and biases of qkv, fc1
    block = split // layout.tp + 6 * d  # norms and biases of proj, fc2
    first = (config.n_in_channels * patch + 1) * d + math.prod(grid(config)) * d  # patch and position embedding
    last = 2 * d + (d + 1) * config.n_out_channels * patch  # norm, head
    ends = first + last if layout.pp == 1 else max(first, last)
    return block * config.depth // layout.pp + ends


def predicted_activations(config, layout):
    """Bytes that a rank keeps for the backward pass; None where the formula does not hold.

    In a block, in units of b n D float32 numbers: inputs of both norms 2, their results 2, q, k, v 3, attention 1, and
    2 mlp_ratio around the GELU. Tensor parallelism splits the last three, sequence parallelism the first one as well.
    Of context-parallel methods, gather adds 2 for the keys and values of all tokens; all_to_all keeps q, k, v and
    attention of all tokens of its heads, and 1 for what comes back.
    """
    plain = config.activation_checkpointing == "none" and not (config.enable_jit or config.dropout)
    if not plain or config.amp_mode != "none":
        return None
    t, c, p, m = layout.tp, layout.cp, layout.pp, config.gradient_accumulation
    rows, columns = grid(config)
    samples = config.global_batch_size / layout.dp
    tokens = shard_sizes(rows, c)[0] * columns
    unit = samples * tokens * config.embed_dim * 4
    sliced = t if config.sequence_parallel else 1
    block = 2 / sliced + 2 + (4 + 2 * config.mlp_ratio) / t
    if c > 1:
        share = rows * columns / tokens  # of this rank's tokens, all tokens are so many times
        block += {"gather": 2 * share, "ring": 0, "all_to_all": 4 * share / c - 3}[config.cp_method] / t
    images, final = samples * tokens * config.patch_size**2 * 4, unit * (1 / sliced + 1)  # final: at the last norm
    inputs, outputs = images * config.n_in_channels, images * config.n_out_channels
    if p > 1:  # micro-batches whose activations are held, on the first and on the last rank
        first, last = {"gpipe": (m, m), "1f1b": (min(p, m), 1), "interleaved": (min(3 * p - 1, 2 * m) / 2, 1)}[
            config.pp_schedule
        ]
        stage = unit * config.depth / p * block
        loss = (last - 1) * outputs  # that of the last one comes later
        return max(first * stage / m + inputs, (last * (stage + final) + loss) / m)
    ends = inputs + outputs + final
    return (unit * config.depth * block + ends) / m


def predicted_messages(config, layout):
    """{phase: {kind: (collectives, bytes)}} of a step, of the rank that sends most: the table at the top."""
    t, c, p, m = layout.tp, layout.cp, layout.pp, config.gradient_accumulation
    rows, columns = grid(config)
    samples, blocks, d = config.global_batch_size / layout.dp, config.depth / p, config.embed_dim
    bands = [n * columns for n in shard_sizes(rows, c)]
    width = 4 if config.amp_mode == "none" else 2  # bytes of an activation
    stream = samples * bands[0] * d  # numbers in the residual stream of this rank
    piece = samples * shard_sizes(bands[0], t)[0] * d  # and in a slice of it
    sent = {phase: {} for phase in PHASES}

    def add(phases, kind, calls, size):
        for phase in phases.split():
            before = sent[phase].get(kind, (0, 0))
            if calls:
                sent[phase][kind] = before[0] + calls, before[1] + size

    if t > 1 and config.sequence_parallel:
        gathered = (t - 1) * piece
        add("forward backward", "all_gather", 2 * blocks * m, 2 * blocks * gathered * width)
        add("forward backward", "reduce_scatter", 2 * blocks * m, 2 * blocks * gathered * width)
        add("forward", "all_gather", m, gathered * width)  # after the last norm
        add("backward", "all_gather", m, gathered * 4)  # in front of the first block
        add("backward", "all_reduce", 1, 2 * (t - 1) / t * (6 * blocks + 2) * d * 4)
    elif t > 1:
        add("forward backward", "all_reduce", 2 * blocks * m, 2 * blocks * 2 * (t - 1) / t * stream * width)
    if c > 1:
        kv, others = samples * 2 * d / t * blocks, [sum(bands) - n for n in bands]
        if config.cp_method == "gather":
            add("forward", "all_gather", blocks * m, (c - 1) * bands[0] * kv * width)
            add("backward", "reduce_scatter", blocks * m, (c - 1) * bands[0] * kv * width)
        elif config.cp_method == "ring":  # a rank never sends the block of the next one, nor gradients of its own
            back = max(others[(i + 1) % c] * width + n * 4 for i, n in enumerate(others))
            add("forward", "all_to_all", (c - 1) * blocks * m, max(others) * kv * width)
            add("backward", "all_to_all", 2 * (c - 1) * blocks * m, back * kv)
        else:  # q, k, v of own tokens, attention of own heads; backward their gradients go the other way
            own = [(c - 1) / c * n for n in bands]
            for phase, a, b in (("forward", 3, 1), ("backward", 1, 3)):
                most = max(a * x + b * y / c for x, y in zip(own, others, strict=True))
                add(phase, "all_to_all", 2 * blocks * m, most * kv / 2 * width)
        add("forward", "all_reduce", m, 2 * (c - 1) / c * 2 * samples * 4)
    if p > 1:
        stages = 2 if config.pp_schedule == "interleaved" else 1
        handed = piece if config.sequence_parallel else stream
        add("forward backward", "send", stages * m, stages * handed * 4)
    shared = Layout(layout.dp * c, shard=layout.shard and layout.shard * c)
    gathers = m if p == 1 else 1  # a pipeline keeps the gathered parameters for the next micro-batch if it can
    units = len(sharded_units(build_model(config), config.wrap_policy, config.wrap_min_params)) / p + 1
    for kind, size in predicted_bytes(config, local_parameters(config, layout), shared).items():
        if config.data_parallel not in SHARDED:
            phase, calls = ("update", shared.dp) if kind == "broadcast" else ("backward", 1)
            add(phase, kind, calls, size)
        elif kind != "all_gather":
            add("backward", kind, units, size)
        elif config.data_parallel == "zero2":
            add("forward", kind, units * gathers, size * gathers / m)
        else:
            add("forward backward", kind, units * gathers, size * gathers / m / 2)
    return sent


# ---- measured: in each rank


class Ranks(team.Team):
    """The ranks of a Team, which hold cases of this file. turn: seconds of some steps, of the slowest rank."""

    combine = max  # a step takes as long as on its slowest rank

    def __init__(self, size, cases):
        super().__init__(size, cases, _serve)


def _serve(pipe, cases):
    config = cases[0].config
    device = comm.init(config.device, config.comm_timeout)
    if device.type == "cpu":
        torch.set_num_threads(1)
    random = torch.Generator().manual_seed(config.seed)
    shapes = [(config.global_batch_size, n, *config.img_size) for n in (config.n_in_channels, config.n_out_channels)]
    batch = [torch.randn(shape, generator=random) for shape in shapes]
    meshes, built = {}, []
    for case in cases:
        built.append(RankCase(case, device, batch, meshes))
    pipe.send([case.figures for case in built])
    while (turn := pipe.recv()) is not None:
        case, steps = turn
        built[case].use_mesh()
        pipe.send(built[case].seconds(steps))
    comm.shutdown()


class RankCase(team.Case):
    """One layout on one rank. meshes: {layout: groups}, of all cases of this process."""

    def __init__(self, case, device, batch, meshes):
        config, self.device = case.config, device
        self.before = torch.cuda.memory_allocated() if device.type == "cuda" else None
        if case.layout not in meshes:
            comm.build_mesh(device, case.layout)
            meshes[case.layout] = comm.swap_meshes({})
        self.meshes = meshes[case.layout]
        self.use_mesh()
        rows = latitude_band(config.img_size, config.patch_size, comm.get_rank("cp"), comm.get_size("cp"))
        self.x, self.y = (t[comm.get_rank("dp") :: comm.get_size("dp"), :, rows].to(device).clone() for t in batch)
        model = build_model(config)
        with reported_as_usage_error(ValueError, f"layout '{case.name}'"):
            split = split_model(model, config)
        apply_compute_options(config, device, model)
        parallel = data_parallel(model, config, device, initial_weights(config), split)
        self.step = TrainingStep(config, device, parallel, build_optimizer(config, model, device))
        torch.manual_seed(config.seed + comm.dropout_stream(config.sequence_parallel))
        self.figures = self.measure()
        if config.tp_backend == "dtensor":  # a saved DTensor has the size of the whole, not of its part
            self.figures["memory"]["activations"] = None

    def use_mesh(self):
        """The groups of this case are those of the process."""
        comm.swap_meshes(self.meshes)

    def measure(self):
        """Memory and messages of a step on this rank."""
        cuda = self.device.type == "cuda"
        self.train(team.WARMUP_STEPS - 1)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.train(1)
        allocated = torch.cuda.max_memory_allocated() - self.before if cuda else None
        measure = memory_of_a_pipeline_step if self.step.parallel.pipeline else memory_of_a_step
        memory = measure(self.step, self.x, self.y) | {"allocated at most": allocated}
        return {"memory": memory, "messages": messages_of_a_step(self.step, self.x, self.y)}


def memory_of_a_pipeline_step(step, x, y):
    """As memory_of_a_step. Activations are the most that is held after the forward pass of a micro-batch."""
    model, stages = step.parallel.model, step.parallel.pipeline.stages
    own = [p for group in step.optimizer.param_groups for p in group["params"]]
    held, saved = Counter(), SavedTensors(model)

    def after_forward(forward, *args, **kwargs):
        output = forward(*args, **kwargs)
        held["activations"] = max(held["activations"], saved.nbytes())
        held["parameters"] = max(held["parameters"], nbytes([*own, *model.parameters()]))
        return output

    def before_update(update, *args, **kwargs):
        held["gradients"] = nbytes([p.grad for p in own if p.grad is not None])
        return update(*args, **kwargs)

    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(_around(stage, "forward_one_chunk", after_forward))
        stack.enter_context(_around(step.scaler, "step", before_update))
        stack.enter_context(saved)
        step(0, x, y)
    optimizer = getattr(step.optimizer, "optim", step.optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    held["optimizer"] = nbytes([value for value in states if isinstance(value, torch.Tensor)])
    return dict(held)


def messages_of_a_step(step, x, y):
    """{phase: {kind: (collectives, bytes)}} that this rank sends in step(0, x, y).

    forward: what is sent inside the forward pass and the loss, and to the next stage. update: inside the optimizer.
    backward: all else, the reduction of gradients included.
    """
    total, forward, update = (CollectiveCounter() for _ in range(3))
    parallel, pipeline = step.parallel, step.parallel.pipeline

    def counted(function, *args, **kwargs):
        with forward:
            return function(*args, **kwargs)

    def sends(function, *args):
        made = function(*args)
        forward.calls["send"] += len(made)
        forward.bytes["send"] += nbytes([one.tensor for one in made])
        return made

    def spans(function, x, y, loss, micro_batches, forward_span, backward_span):
        @contextmanager
        def counted_span():
            with forward_span(), forward:
                yield

        def counted_loss(*args):
            return counted(loss, *args)

        return function(
            x,
            y,
            *((counted_loss, micro_batches, forward_span) if pipeline else (loss, micro_batches, counted_span)),
            backward_span,
        )

    def updates(function, *args, **kwargs):
        with update:
            return function(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(_around(parallel, "forward_backward", spans))
        stack.enter_context(_around(step.scaler, "step", updates))
        for stage in pipeline.stages if pipeline else ():
            stack.enter_context(_around(stage, "forward_one_chunk", counted))
            stack.enter_context(_around(stage, "get_fwd_send_ops", sends))
        with total:
            step(0, x, y)

    def table(calls, size):
        return {kind: (calls[kind], size[kind]) for kind in calls if calls[kind] and kind != "recv"}

    return {
        "forward": table(forward.calls, forward.bytes),
        "backward": table(total.calls - forward.calls - update.calls, total.bytes - forward.bytes - update.bytes),
        "update": table(update.calls, update.bytes),
    }


@contextmanager
def _around(owner, name, function):
    """Inside, owner.name(...) is function(the method, ...)."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(method, *args, **kwargs))
    try:
        yield
    finally:
        delattr(owner, name)


# ---- shown


def summarize(case, figures, turns):
    """One row. figures: of every rank. turns: (seconds of a step, of one rank) of every round."""
    config, layout = case.config, case.layout
    memory = {
        name: max((figure["memory"].get(name) or 0) for figure in figures) or None
        for name in (*HELD, "allocated at most")
    }
    messages = {}
    for phase in PHASES:
        of_ranks = [figure["messages"][phase] for figure in figures]
        kinds = sorted(set().union(*of_ranks))
        messages[phase] = {
            kind: tuple(map(max, zip(*(of[kind] for of in of_ranks if kind in of), strict=True))) for kind in kinds
        }
    shared = Layout(layout.dp * layout.cp, shard=layout.shard and layout.shard * layout.cp)
    return {
        "layout": case.name,
        "embed_dim": config.embed_dim,
        "ranks": layout.world_size,
        "step_seconds": statistics.median(own for own, _ in turns),
        "ratio": statistics.median(own / one for own, one in turns),
        "ratio_of_rounds": [own / one for own, one in turns],
        "memory": memory,
        "predicted_memory": predicted_memory(config, local_parameters(config, layout), shared)
        | {"activations": predicted_activations(config, layout)},
        "messages": messages,
        "predicted_messages": predicted_messages(config, layout),
    }


def print_tables(results):
    columns = {"layout": "", "embed": "d", "ranks": "d", "ms a step": ".0f", "to one rank": ".2f", "in the rounds": ""}
    rows = []
    for r in results:
        spread = f"{min(r['ratio_of_rounds']):.2f} to {max(r['ratio_of_rounds']):.2f}"
        rows.append((r["layout"], r["embed_dim"], r["ranks"], 1000 * r["step_seconds"], r["ratio"], spread))
    print("Time of a step with the same whole batch, as ratio to one rank in the same round\n")
    print(format_table(columns, rows))

    columns = {"layout": "", "embed": "d", **dict.fromkeys(HELD[:3], ".2f"), "sum": ".2f", "formula": ".2f"}
    columns |= {"activations": ".2f", "its formula": ".2f", "allocated at most": ".2f"}
    rows = []
    for r in results:
        sizes, formula = (
            {name: None if size is None else size / MIB for name, size in r[key].items()}
            for key in ("memory", "predicted_memory")
        )
        rows.append(
            (r["layout"], r["embed_dim"], *(sizes[name] for name in HELD[:3]), sum(sizes[name] for name in HELD[:3]),
             sum(formula[name] for name in HELD[:3]), sizes["activations"], formula["activations"],
             sizes["allocated at most"])
        )  # fmt: skip
    print("\nMemory: MiB on the rank that holds most\n")
    print(format_table(columns, rows))

    columns = {"layout": "", "embed": "d", "pass": "", "collectives": "", "MiB": ".2f"}
    columns |= {"at least": "", "at least, MiB": ".2f"}
    rows = []
    for r in results:
        for phase in PHASES:
            sent, least = r["messages"][phase], r["predicted_messages"][phase]
            if sent or least:
                rows.append((r["layout"], r["embed_dim"], phase, *_in_words(sent), *_in_words(least)))
    print("\nMessages of a step: collectives, and MiB that a rank sends in them, beside the theory\n")
    print(format_table(columns, rows) + "\n")


def _in_words(messages):
    text = ", ".join(f"{calls:.0f} {kind}" for kind, (calls, _) in sorted(messages.items()))
    return text or "none", sum(size for _, size in messages.values()) / MIB


def write_picture(path, results):
    """Left: memory of a rank, stacked, the formula as a mark. Right: MiB sent in a step, forward, backward, update."""
    figure = Figure(figsize=(12, 1.8 + 0.4 * len(results)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    colors = ("#4477aa", "#66ccee", "#ccbb44", "#bbbbbb")
    parts = [[r["memory"][name] for r in results] for name in HELD]
    _stack(axes[0], parts, HELD, colors)
    formula = [sum(size or 0 for size in r["predicted_memory"].values()) for r in results]
    _mark(axes[0], formula, "formula")
    parts = [[sum(size for _, size in r["messages"][phase].values()) for r in results] for phase in PHASES]
    _stack(axes[1], parts, PHASES, ("#cc6677", "#882255", "#ddaa99"))
    least = [sum(size for sent in r["predicted_messages"].values() for _, size in sent.values()) for r in results]
    _mark(axes[1], least, "at least")
    axes[0].set(title=f"memory of a rank, embed_dim {results[0]['embed_dim']}", xlabel="MiB")
    axes[1].set(title="sent by a rank in a step", xlabel="MiB")
    axes[0].set_yticks(range(len(results)), [r["layout"] for r in results])
    axes[0].invert_yaxis()
    for one in axes:
        one.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, fontsize="small", frameon=False)
        one.spines[["top", "right"]].set_visible(False)
    with whole_file(Path(path)) as part:
        figure.savefig(part, format="png", dpi=120)


def _stack(axes, parts, names, colors):
    start = [0.0] * len(parts[0])
    for values, name, color in zip(parts, names, colors, strict=True):
        values = [(value or 0) / MIB for value in values]
        axes.barh(range(len(values)), values, left=start, label=name, color=color)
        start = [a + b for a, b in zip(start, values, strict=True)]


def _mark(axes, values, name):
    axes.plot([value / MIB for value in values], range(len(values)), "k|", markersize=14, label=name)
