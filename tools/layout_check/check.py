"""Compare layouts with one device, and say where a difference begins: `python plan.py check`.

Every layout trains three steps with random data, and so does one device, in float64 by default. Equal are the outputs
of all modules, the loss, gradients, weights after each step, buffers, and an output in evaluation.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from distributed.shard.spec import part_of
from tools.benchmarks.cases import check_machine
from tools.benchmarks.layouts import OPTIONS, parse_layout, split_words
from tools.instruments.pool import Process
from tools.instruments.rank_case import build_case
from tools.instruments.team import Case, Teams, use_mesh
from tools.layout_check import causes
from tools.layout_check.recording import (
    BATCH,
    EVALUATION,
    FORWARD,
    GRADIENT,
    INITIAL,
    STAGES,
    UNREDUCED,
    UPDATES,
    Key,
    Part,
    Record,
    record,
)
from tools.planner.layouts import script_of
from tools.tables import format_table
from utils import comm
from utils.errors import ArgumentParser
from utils.files import write_json
from utils.sample_order import own_positions
from utils.schema import Config

LAYOUTS = ("dp2", "dp2,data_parallel=fsdp", "domain2")
SHOWN = 4  # names of outputs that could not be compared
TOLERANCES = {"float64": 1e-8, "float32": 1e-3}  # relative to the largest number of a tensor
# Random streams and rounding of one's own would hide a difference.
PLAIN = {"dropout": 0.0, "amp_mode": "none", "enable_jit": False, "enable_cuda_graphs": False, "warmup": 0, "ema": None}


@dataclass
class Result:
    """The finding about a layout. error: the largest relative difference, of whatever is compared.

    stage, name: where it first differs, in the order of execution; "" where everything is equal. kind: the class of the
    module. ranks: those that differ. skipped: names of outputs that could not be compared.
    """

    layout: str
    error: float
    stage: str = ""
    name: str = ""
    kind: str = ""
    first_error: float = 0.0
    ranks: Sequence[int] = ()
    cause: str = ""
    skipped: Sequence[str] = ()

    @property
    def equal(self) -> bool:
        """Tell whether the layout gives the numbers of one device."""
        return not self.stage


def plain(config: Config) -> Config:
    """The config without what makes layouts differ in any case."""
    return config.model_copy(update=PLAIN)


def record_serially(rank: Process, case: Case, file: Path, dtype: str, read_data: bool = False) -> None:
    """On a single rank: record it into a file."""
    found, kinds, drawing = in_dtype(rank, case, dtype, read_data)
    parts = {key: part.value.cpu() for key, part in found.items() if key[0] != UNREDUCED}
    torch.save({"parts": parts, "kinds": kinds, "drawing": sorted(drawing)}, file)


def in_dtype(rank: Process, case: Case, dtype: str, read_data: bool) -> tuple[Record, dict[str, str], set[str]]:
    """The record of a case, computed in a dtype."""
    use_mesh(rank, case.layout)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return record(case.config, rank.device, read_data)
    finally:
        torch.set_default_dtype(torch.float32)


def compare(rank: Process, case: Case, file: Path, dtype: str, read_data: bool = False) -> Result:
    """On every rank of a layout: where it first differs from one device. file: of record_serially."""
    (found, _, _), tolerance = in_dtype(rank, case, dtype, read_data), TOLERANCES[dtype]
    serial = torch.load(file, mmap=True, weights_only=True)
    wholes: dict[Key, Tensor] = serial["parts"]
    errors, wanted = errors_of(found, wholes, case.config.gradient_accumulation)
    seen = comm.gather(errors)
    ordered = sorted(wholes, key=lambda key: STAGES.index(key[0]))  # stable: in a stage as it was recorded
    compared = set().union(*seen)
    skipped = [key[1] for key in ordered if key not in compared and (key[1] or comm.get_size("pp") == 1)]
    weights = set().union(*comm.gather([key for key in found if key[0] == INITIAL]))
    if extra := sorted(weights - wholes.keys()):
        apart = "one device has no such weight: a weight that several layers share has come apart"
        return Result(case.name, math.inf, *extra[0], ranks=range(comm.world_size()), cause=apart)
    result = Result(case.name, max(max(of_rank.values(), default=0.0) for of_rank in seen), skipped=skipped)
    for key in ordered:
        of_key = [of_rank.get(key, 0.0) for of_rank in seen]
        if max(of_key) > tolerance:
            scale = wholes[key].abs().max().item() or 1.0
            module = key[1].split(" (")[0]
            kind = serial["kinds"].get(module, "")
            result.stage, result.name, result.kind, result.first_error = *key, kind, max(of_key)
            result.ranks = [r for r, error in enumerate(of_key) if error > tolerance]
            if key[0] == FORWARD and module in serial["drawing"]:
                result.cause = causes.RANDOM
            else:
                result.cause = causes.cause(key, kind, result.ranks, found, wanted.get(key), scale, tolerance)
            break
    return result


def errors_of(
    found: Record, wholes: dict[Key, Tensor], micro_batches: int = 1
) -> tuple[dict[Key, float], dict[Key, Tensor]]:
    """Of all that can be compared on this rank: its relative error, and what one device has in its place.

    All ranks call it together. wholes: the tensors of one device.
    """
    shapes = comm.gather((coordinates(), {key: part.shape for key, part in found.items()}))
    errors: dict[Key, float] = {}
    wanted: dict[Key, Tensor] = {}
    for key, part in found.items():
        expected = expected_part(key, part, wholes[key], shapes, micro_batches) if key in wholes else None
        if expected is not None:
            wanted[key] = expected.to(part.value.device)
            errors[key] = relative_error(key, part, wanted[key], wholes, shapes, micro_batches)
    return errors, wanted


def coordinates() -> dict[str, int]:
    """This rank's place in the dimensions that split tensors."""
    return {name: comm.get_rank(name) for name in ("dp", "pp", "cp", "tp", "domain_lat", "domain_lon")}


def expected_part(key: Key, part: Part, whole: Tensor, shapes: list, micro_batches: int) -> Tensor | None:
    """The tensor that one device has in the place of a rank's part; None where that place is not known.

    A part of a dimension is found by the ranks whose parts make up its length. shapes: of the parts of all ranks.
    """
    if whole.dim() != len(part.shape):
        return None
    here = coordinates()
    for dim, size in enumerate(part.shape):
        for names in () if whole.shape[dim] == size else splits_of(key[0], dim, whole.dim()):
            along = [
                ([there[name] for name in names], sizes[key][dim])
                for there, sizes in shapes
                if key in sizes and all(there[name] == here[name] for name in here if name not in names)
            ]
            if sum(length for _, length in along) == whole.shape[dim]:
                own = [here[name] for name in names]
                if names == ("dp",):
                    whole = whole[own_positions(len(whole), here["dp"], comm.get_size("dp"), micro_batches)]
                    break
                whole = whole.narrow(dim, sum(length for place, length in along if place < own), size)
                break
    if whole.shape != part.shape:
        return None
    return part_of(whole, part.spec) if part.spec else whole


def splits_of(stage: str, dim: int, dims: int) -> list[tuple[str, ...]]:
    """The dimensions of the mesh, alone or together, that may split a dimension of a tensor with so many."""
    if stage not in (BATCH, FORWARD, EVALUATION):  # a weight
        return [("tp",)]
    if dim == 0:
        return [("dp",)]
    if dims > 3:  # images, (B, C, H, W)
        return [("cp",), ("domain_lat",)] if dim == 2 else [("domain_lon",)]
    return [("tp",)] if dim == dims - 1 else [("cp",), ("tp",), ("cp", "tp")]  # tokens, (B, N, D), or (B, D)


def relative_error(
    key: Key, part: Part, wanted: Tensor, wholes: dict[Key, Tensor], shapes: list, micro_batches: int
) -> float:
    """The largest difference, relative to the largest number of the whole tensor.

    Of weights after steps, those count whose gradient is more than rounding: Adam divides a gradient by its size.
    """
    apart, gradient = (part.value - wanted).abs(), wholes.get((GRADIENT, key[1]))
    if key[0] in UPDATES and gradient is not None:
        size = expected_part(key, part, gradient.abs(), shapes, micro_batches)
        assert size is not None
        apart = apart[(size > torch.finfo(size.dtype).eps ** 0.5 * gradient.abs().max()).to(apart.device)]
    if not apart.numel():
        return 0.0
    largest = apart.max().item() / (wholes[key].abs().max().item() or 1.0)
    return math.inf if math.isnan(largest) else largest


def as_text(results: Sequence[Result], dtype: str) -> str:
    """A table of all layouts, and below it what is known of each that differs."""
    rows = [
        [r.layout, r.error, "equal" if r.equal else f"differs: {r.stage}, {r.name or 'the model'}"] for r in results
    ]
    lines = [format_table({"layout": "", "largest difference": ".1e", "result": ""}, rows)]
    lines.append(f"relative, in {dtype}; up to {TOLERANCES[dtype]:.0e} counts as equal")
    for r in results:
        if not r.equal:
            of = f" ({r.kind})" if r.kind else ""
            where, ranks = f"{r.name or 'the model'}{of} in the {r.stage}", ", ".join(map(str, r.ranks))
            lines.append(f"\n{r.layout}: the first to differ is {where}, by {r.first_error:.1e}, on rank {ranks}")
            lines.append(f"    likely cause: {r.cause}")
        if r.skipped:
            more = f" and {len(r.skipped) - SHOWN} more" if len(r.skipped) > SHOWN else ""
            lines.append(
                f"{r.layout}: not compared: {', '.join(name or 'the model' for name in r.skipped[:SHOWN])}{more}"
            )
    return "\n".join(lines)


def cases_of(words: Sequence[str], layouts: Sequence[str]) -> list[Case]:
    """The case of one device, and one for each layout, such as 'tp2xdp2' or 'domain2x2,data_parallel=fsdp'."""
    given = [] if any(word.startswith("--yaml_config") for word in words) else ["--yaml_config=config/ViT.yaml"]
    cases = [build_case("one device", "train.py", [*given, *words], 1)]
    batch = [f"--global_batch_size={cases[0].config.global_batch_size}"]
    for text in layouts:
        sizes, ranks = parse_layout(text, ("tp", "cp", "pp", "domain", "dp"))
        script = script_of({option: sizes[dim] for dim, option in OPTIONS.items()})
        cases.append(build_case(text, script, [*given, *split_words(sizes), *words, *batch], ranks))
    return [replace(case, config=plain(case.config)) for case in cases]


def main(argv: Sequence[str]) -> int:
    """Command line of `plan.py check`; returns the exit status: 0 where all layouts are equal, 1 where one is not."""
    parser = ArgumentParser(prog="plan.py check", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--layouts", nargs="+", default=LAYOUTS, metavar="LAYOUT", help="tp2xdp2, domain2x2, ... (%(default)s)"
    )
    parser.add_argument("--dtype", choices=TOLERANCES, default="float64", help="of the comparison (%(default)s)")
    parser.add_argument("--read_data", action="store_true", help="train on the config's data, not on random numbers")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    options, words = parser.parse_known_args(argv)
    serial, *cases = cases_of(words, options.layouts)
    check_machine(cases)
    with tempfile.TemporaryDirectory() as folder, Teams(serial.config) as teams:
        file = Path(folder) / "one_device.pt"
        teams.call(1, record_serially, serial, file, options.dtype, options.read_data)
        results = [teams.call(case.ranks, compare, case, file, options.dtype, options.read_data)[0] for case in cases]
    print(as_text(results, options.dtype))
    if options.json:
        write_json(options.json, [asdict(r) | {"equal": r.equal} for r in results])
    return 0 if all(result.equal for result in results) else 1
