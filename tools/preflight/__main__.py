"""Check what a course or a long run depends on, before it starts: software, devices, ranks, network, file system.

    python -m tools.preflight                                   this machine; also: make preflight
    torchrun --nproc_per_node 2 -m tools.preflight              and whether two ranks reach one another
    sbatch -N 2 submit_preflight.sh                             the same over nodes (docs/launch.md)

Each line starts with ok, warn or FAIL and says what was checked, what was found, and what to do. Nothing is trained.
Every wait has a time limit, and a missing rank is named. Exit status: 0 nothing failed,
1 a check failed, 2 wrong options.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence

try:
    import torch  # noqa: F401
except ImportError as error:
    # Whoever takes the wrong Python reads one line here, and no traceback.
    sys.exit(f"FAIL  torch: {error} - make setup, or take the python of the environment that has it")

from tools.preflight.checks import CHECKS, Results
from tools.preflight.rendezvous import Absent, CheckResult, Rendezvous, limited, merge
from utils.connection import run_ranks
from utils.errors import FAILED_STATUS, ArgumentParser, UsageError, first_line, float_in_range
from utils.launch import read_launch
from utils.rank_failure import exit_at_once

OTHER_PATHS = ("valid_data", "inf_data", "global_means", "global_stds", "time_means")  # sites/launch.sh gives them


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, on every rank; rank 0 prints the results. Returns the exit status."""
    options = parse(argv)
    ranks, count = Rendezvous(read_launch(), options.timeout), Counter[str]()
    for result in run_checks(options, ranks):
        count[result.level] += 1
        if ranks.rank == 0:
            print(result.line(), flush=True)
    status = FAILED_STATUS if count["FAIL"] else 0
    if ranks.rank == 0:
        print(f"\n{count['ok']} ok, {count['warn']} warn, {count['FAIL']} FAIL")
    if ranks.size > 1:
        ranks.leave()
        exit_at_once(status)  # a thread may still wait for a rank that hangs
    return status


def run_checks(options: argparse.Namespace, ranks: Rendezvous) -> Results:
    """Yield the results of all ranks, check by check. A missing rank is the last result: no check can follow."""
    try:
        if ranks.size > 1:
            ranks.connect()
            message = f"{ranks.size} ranks met at {ranks.address}: {ranks.names(range(ranks.size))}"
            yield CheckResult("ok", "rendezvous", message)
        for check in CHECKS:
            end = f"the end of {check.__name__.replace('_', ' ')}"
            # A check has two time limits for itself, so the others wait for three at its end.
            yield from merge(ranks.exchange(end, attempt(check, options, ranks), 3 * options.timeout), ranks)
    except Absent as error:
        result = CheckResult("FAIL", "rendezvous", str(error), "its own output may say why")
        if ranks.rank > 0:
            print(f"rank {ranks.rank}: {result.line()}", flush=True)  # rank 0 may be the missing one
        yield result


def attempt(
    check: Callable[..., Results],
    options: argparse.Namespace,
    ranks: Rendezvous,
) -> list[CheckResult]:
    """The results of a check on this rank. An exception or a timeout becomes a FAIL."""
    results: list[CheckResult] = []
    try:
        limited(2 * options.timeout, lambda: results.extend(check(options, ranks)))
    except Exception as error:
        # These errors explain themselves. Any other one is clearer beside its type.
        kind = "" if isinstance(error, Absent | TimeoutError | UsageError) else f"{type(error).__name__}: "
        name, advice = check.__name__.replace("_", " "), "the output of the ranks may say more"
        # The list is a copy, since a thread that hangs may still add to the old one.
        results = [*results, CheckResult("FAIL", name, f"{kind}{first_line(error)}", advice)]
    return results


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options. Raises UsageError for options that cannot be used."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--expdir", default="logs", metavar="FOLDER", help="where runs are written (%(default)s)")
    option("--train_data_path", metavar="FOLDER", help="folder of the data, searched for .h5 files (data)")
    option("--device", default="auto", metavar="NAME", help="as in training: cpu, cuda, ... (%(default)s)")
    option(
        "--timeout",
        type=float_in_range(0.1, 1e6),
        default=30,
        metavar="S",
        help="seconds to wait for ranks (%(default)s)",
    )
    # The launcher of a site passes every path of a run, and the checks need only that of the training data.
    for name in OTHER_PATHS:
        option(f"--{name}_path", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_ranks(main)
