"""Processor time until the programs answer: their help, a refusal, and plans.

    python -m docs.examples.how_long 3     each three times, and the least of them

With `long`, the commands of a day's work as well, once: `make demo`, `make test`, `make site`.
"""

import resource
import subprocess
import sys
import time

from tools.tables import format_table

HELP = [
    f"{name} --help" for name in ("train.py", "train_mp.py", "train_shard.py", "forecast.py", "plan.py", "benchmark.py")
]
SHORT = (
    *HELP,
    "train.py --config=quik",
    "train_shard.py --config=shard_quick --domain_parallel 3",
    "plan.py --config=short --gpus 8 --data_parallel=fsdp",
    "plan.py --config=short --gpus 8",
)
LONG = ("make demo", "make test", "make site")


def measure(words: list[str]) -> tuple[float, float]:
    """Seconds of processor time, of all processes, and on the clock, of one run of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    clock = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return processor, clock


def main(rounds: int, with_long: bool) -> None:
    """Print the table."""
    # Rounds alternate, so that a busy minute of the machine falls on all commands alike.
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for command in SHORT:
            times.setdefault(command, []).append(measure([sys.executable, *command.split()]))
    for command in LONG if with_long else ():
        times[command] = [measure(command.split())]
    rows = []
    for command, measured in times.items():
        least = [min(column) for column in zip(*measured, strict=True)]
        rows.append([f"`{command}`", *least])
    print(format_table({"command": "", "processor, s": ".1f", "clock, s": ".1f"}, rows))


if __name__ == "__main__":
    main(int(sys.argv[1]), "long" in sys.argv[2:])
