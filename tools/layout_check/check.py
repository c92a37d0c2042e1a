"""Compare layouts with one device, and say where a difference begins: `python plan.py check`.

Every layout trains three steps with random data, and so does one device, in float64 by default. Equal are the outputs
of all modules, the loss, gradients, weights after each step, buffers, an output in evaluation, and the state that is
saved and read back.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tools.benchmarks.cases import OPTIONS, check_machine, parse_layout, split_words
from tools.instruments.rank_case import build_case
from tools.instruments.ranks import Case, Process, Teams, use_mesh
from tools.layout_check import causes
from tools.layout_check.causes import Apart
from tools.layout_check.differences import TOLERANCES, errors_of, size_of
from tools.layout_check.record import FORWARD, INITIAL, INPUT, MOMENTS, RELOADED, STAGES, UNREDUCED, Key
from tools.layout_check.recording import Training, record
from tools.layout_check.wide import quick_compilation
from tools.planner.layouts import script_of
from tools.tables import format_table
from utils import comm
from utils.errors import ArgumentParser
from utils.files import write_json
from utils.schema import Config

# Compared unless --layouts names others.
LAYOUTS = ("dp2", "dp2,data_parallel=fsdp", "domain2")
SHOWN = 4  # names of outputs that could not be compared
# Random streams and rounding of one's own would hide a difference.
PLAIN = {
    "dropout": 0.0,
    "amp_mode": "none",
    "enable_cuda_graphs": False,
    "warmup": 0,
    "ema": None,
}


@dataclass
class Result:
    """The finding about a layout. error: the largest relative difference, of whatever is compared.

    stage, name: where it first differs, in the order of execution; "" where everything is equal. kind: the class of the
    module. ranks: those that differ. skipped: names of outputs that could not be compared. unsaved: why its state
    cannot be saved and read back; "" where it can.
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
    unsaved: str = ""

    @property
    def equal(self) -> bool:
        """Tell whether the layout gives the numbers of one device, and can save them."""
        return not self.stage and not self.unsaved


def plain(config: Config, compiles: bool = False) -> Config:
    """The config without what makes layouts differ in any case. compiles: whether enable_jit stays."""
    update = PLAIN if compiles else {**PLAIN, "enable_jit": False}
    return config.model_copy(update=update)


def record_serially(
    rank: Process,
    case: Case,
    file: Path,
    dtype: str,
    read_data: bool = False,
) -> str:
    """On a single rank: record it into a file. Returns why its state cannot be saved and read back, or ""."""
    with default_dtype(dtype):
        training = train_layout(rank, case, read_data, state_folder(file, case))
    # Gradients before their reduction are looked up on the ranks alone, so they have no counterpart here.
    parts: dict[Key, Tensor] = {}
    for key, part in training.found.items():
        if key[0] != UNREDUCED:
            parts[key] = part.value.cpu()
    found = {
        "parts": parts,
        "kinds": training.kinds,
        "drawing": sorted(training.drawing),
    }
    torch.save(found, file)
    return training.unsaved


def state_folder(file: Path, case: Case) -> Path:
    """The folder into which the ranks of a case save their state. file: of record_serially."""
    return file.with_name(f"state of {case.layout.world_size} ranks")


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Inside, tensors are made in a dtype where nothing else is said."""
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        # The process serves other cases after this one.
        torch.set_default_dtype(torch.float32)


def train_layout(
    rank: Process,
    case: Case,
    read_data: bool = False,
    folder: Path | None = None,
) -> Training:
    """The record of a case, in the default dtype. folder: for its state, None where it is not saved."""
    use_mesh(rank, case.layout)
    with quick_compilation(case.config):
        return record(case.config, rank.device, read_data, folder)


def compare(
    rank: Process,
    case: Case,
    file: Path,
    dtype: str,
    read_data: bool = False,
) -> Result:
    """On every rank of a layout: where it first differs from one device. file: of record_serially."""
    # What counts as rounding depends on the dtype too.
    with default_dtype(dtype):
        training = train_layout(rank, case, read_data, state_folder(file, case))
        return find_difference(case, training, file, dtype)


def find_difference(
    case: Case,
    training: Training,
    file: Path,
    dtype: str,
) -> Result:
    """Where a training on all ranks first differs from that of one device. file: of record_serially."""
    tolerance = TOLERANCES[dtype]
    serial = torch.load(file, mmap=True, weights_only=True)  # one copy in memory for all ranks
    wholes: dict[Key, Tensor] = serial["parts"]
    errors, wanted = errors_of(training.found, wholes, case.config)
    seen = comm.gather(errors)

    # A weight that one device lacks has nothing to be compared with.
    extra = _extra_weights(training, wholes)
    if extra:
        untied = "one device has no such weight: a weight that several layers share has come apart"
        return Result(case.name, math.inf, *extra[0], ranks=range(comm.world_size()), cause=untied)

    in_stages = [key for key in wholes if key[0] in STAGES]
    ordered = sorted(in_stages, key=lambda key: STAGES.index(key[0]))  # stable: in a stage as it was recorded
    errors_in_stages = [error for of_rank in seen for key, error in of_rank.items() if key[0] in STAGES]
    largest = max(errors_in_stages, default=0.0)
    compared = set().union(*seen)
    result = Result(case.name, largest, skipped=not_compared(ordered, compared), unsaved=training.unsaved)

    # Whatever comes later follows from the first difference, so that only this one is explained.
    for key in ordered:
        of_key = [of_rank.get(key, 0.0) for of_rank in seen]
        if max(of_key) <= tolerance:
            continue
        stage, name = key
        module = name.split(" (")[0]
        result.stage = stage
        result.name = name
        result.kind = serial["kinds"].get(module, "")
        result.first_error = max(of_key)
        result.ranks = [r for r, error in enumerate(of_key) if error > tolerance]
        # No two layouts draw the same random numbers, so no pattern would explain anything here.
        if stage == FORWARD and module in serial["drawing"]:
            result.cause = causes.RANDOM
            break
        # A module with a wrong input is not the cause of its wrong output.
        input_errors = [of_rank[INPUT, name] for of_rank in seen if (INPUT, name) in of_rank]
        apart = Apart(
            key,
            result.kind,
            result.ranks,
            result.first_error,
            training.found,
            wanted.get(key),
            limit=tolerance * size_of(wholes[key]),  # absolute, for this tensor
            config=case.config,
            input_is_right=max(input_errors) <= tolerance if input_errors else None,
        )
        result.cause = causes.cause(apart)
        break
    return result


def _extra_weights(training: Training, wholes: dict[Key, Tensor]) -> list[Key]:
    """The weights that some rank has and one device has not, on all ranks alike."""
    of_ranks = comm.gather([key for key in training.found if key[0] == INITIAL])
    weights = set().union(*of_ranks)
    return sorted(weights - wholes.keys())


def not_compared(ordered: Sequence[Key], compared: set[Key]) -> list[str]:
    """Names of the tensors of one device that no rank could compare. ordered: all of them."""
    names = []
    for stage, name in ordered:
        is_of_a_read_state = stage in (RELOADED, MOMENTS)  # which is not there where it cannot be saved
        # The stages of a pipeline are called one by one, so the model as a whole (the name "") has no output.
        is_of_no_stage = not name and comm.get_size("pp") > 1
        if (stage, name) not in compared and not is_of_a_read_state and not is_of_no_stage:
            names.append(name)
    return names


def as_text(results: Sequence[Result], dtype: str) -> str:
    """A table of all layouts, and below it what is known of each that differs."""
    rows = [[r.layout, r.error, in_words(r)] for r in results]
    lines = [format_table({"layout": "", "largest difference": ".1e", "result": ""}, rows)]
    lines.append(f"relative, in {dtype}; up to {TOLERANCES[dtype]:.0e} counts as equal")
    if not any(r.unsaved for r in results):
        lines.append("weights, buffers and moments were saved and read back in each layout")
    # A layout may have several lines: it may not be saved, differ, and leave outputs out.
    for r in results:
        if r.unsaved:
            lines.append(f"\n{r.layout}: its state cannot be saved and read back: {r.unsaved}")
        if r.stage:
            kind = f" ({r.kind})" if r.kind else ""
            where = f"{r.name or 'the model'}{kind} in the {r.stage}"
            ranks = ", ".join(map(str, r.ranks))
            lines.append(f"\n{r.layout}: the first to differ is {where}, by {r.first_error:.1e}, on rank {ranks}")
            lines.append(f"    likely cause: {r.cause}")
        if r.skipped:
            names = ", ".join(name or "the model" for name in r.skipped[:SHOWN])
            more = f" and {len(r.skipped) - SHOWN} more" if len(r.skipped) > SHOWN else ""
            lines.append(f"{r.layout}: not compared: {names}{more}")
    return "\n".join(lines)


def in_words(result: Result) -> str:
    """The result in a word, or the place where it differs."""
    if result.stage:
        return f"differs: {result.stage}, {result.name or 'the model'}"
    return "cannot be saved" if result.unsaved else "equal"


def cases_of(words: Sequence[str], layouts: Sequence[str]) -> list[Case]:
    """The case of one device, and one for each layout, such as 'tp2xdp2' or 'domain2x2,data_parallel=fsdp'.

    Where a layout shares out members, and the words ask for no ensemble, all of them train one.
    """
    names_a_file = any(word.startswith("--yaml_config") for word in words)
    given = [] if names_a_file else ["--yaml_config=config/ViT.yaml"]
    parsed = [parse_layout(text, (*OPTIONS, "dp")) for text in layouts]
    cases = [build_case("one device", "train.py", [*given, *words], 1)]
    most = max([int(sizes["ens"]) for sizes, _ in parsed], default=1)
    if most > 1 and cases[0].config.ensemble_size == 1:
        # One member more than ranks, so that one rank has two.
        given += ["--loss=crps", f"--ensemble_size={most + 1}"]
        cases = [build_case("one device", "train.py", [*given, *words], 1)]
    # Every layout trains on the batch of one device, whatever its number of ranks.
    batch = [f"--global_batch_size={cases[0].config.global_batch_size}"]
    for text, (sizes, ranks) in zip(layouts, parsed, strict=True):
        splits = {option: sizes[dim] for dim, option in OPTIONS.items()}
        # The script follows from what is split, as a user would have to choose it.
        script = script_of(splits)
        cases.append(build_case(text, script, [*given, *split_words(sizes), *words, *batch], ranks))
    # One device compiles nothing, for layouts that do to be compared with.
    return [replace(case, config=plain(case.config, case.ranks > 1)) for case in cases]


def main(argv: Sequence[str]) -> int:
    """Command line of `plan.py check`; returns the exit status: 0 where all layouts are equal, 1 where one is not."""
    parser = ArgumentParser(
        prog="plan.py check",
        description=__doc__.partition("\n")[0],
        epilog="With --all, compositions of all options in place of layouts: plan.py check --all --help.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--layouts", nargs="+", default=LAYOUTS, metavar="LAYOUT", help="tp2xdp2, domain2x2, ... (%(default)s)"
    )
    parser.add_argument("--dtype", choices=TOLERANCES, default="float64", help="of the comparison (%(default)s)")
    parser.add_argument("--read_data", action="store_true", help="train on the config's data, not on random numbers")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    options, words = parser.parse_known_args(argv)
    # One device comes first, since its record is what every layout is compared with.
    serial, *cases = cases_of(words, options.layouts)
    check_machine(cases)
    with tempfile.TemporaryDirectory() as folder, Teams(serial.config) as teams:
        file = Path(folder) / "one_device.pt"
        shared = (file, options.dtype, options.read_data)
        # A model that one device cannot save is reported, and its layouts are compared all the same.
        (unsaved,) = teams.call(1, record_serially, serial, *shared)
        results = []
        if unsaved:
            results.append(Result(serial.name, 0.0, unsaved=unsaved))
        for case in cases:
            result, *_ = teams.call(case.ranks, compare, case, *shared)  # that of rank 0
            results.append(result)
    print(as_text(results, options.dtype))
    if options.json:
        # The property `equal` is no field, so asdict leaves it out.
        write_json(options.json, [asdict(r) | {"equal": r.equal} for r in results])
    return 0 if all(result.equal for result in results) else 1
