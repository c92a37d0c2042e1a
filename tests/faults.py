"""Break training runs in every way a cluster does, and see whether they end as if nothing had happened.

    make faults ROUNDS=3        or        python -m tests.faults --rounds 3 [--only "rank killed"]

Each round starts a run of two ranks for every kind of fault, breaks it, starts the same command again until it is
finished, and compares its losses with those of an undisturbed run.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from pytest import approx

from tests.conftest import TINY, make_data, words_of
from tests.faults_in_phases import PHASES, stop_in
from tests.support.launch import losses, rank_pids, torchrun
from tests.support.programs import finish, start_ranks

ITERATIONS = 240
CHECKPOINT_BYTES = 600_000  # of the tiny model below, generously


def by_torchrun(words, ranks=2):
    """Start ranks of train.py as a user does."""
    return [torchrun(words, ranks)]


def by_fork(words, ranks=2):
    """Start them in milliseconds."""
    return start_ranks(["train.py", *words], ranks)


class Run:
    """One training run of two ranks, in a folder of its own. data: config keys. launch: by_torchrun or by_fork."""

    def __init__(self, data, folder, launch):
        self.folder, self.launch, self.tolerance = Path(folder), launch, 0.0
        self.checkpoints = self.folder / "logs/quick/00/checkpoints"
        often = {"warmup": 5, "checkpoint_every": 10, "validate_every": 4, "comm_timeout": 60}
        self.words = words_of(TINY | data | often | {"num_iters": ITERATIONS, "expdir": self.folder / "logs"})

    def start(self):
        return self.launch(self.words)

    def wait_for_checkpoint(self, processes):
        """Until two checkpoints are complete, so that one is left if one is damaged, and a random while longer."""
        while processes[0].poll() is None and len(list(self.checkpoints.glob("iter-*"))) < 2:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 1))

    def finish(self):
        """Start until the run is finished; returns the output of the first start."""
        first = None
        for _ in range(3):
            status, output = finish_all(self.start())
            first = first or output
            if status == 0:
                return first
        raise AssertionError(f"the run does not finish:\n{output}")

    def losses(self):
        return losses(self.folder, "00")


def finish_all(processes):
    """The worst exit status, and all output."""
    ended = [finish(process) for process in processes]
    return max((abs(status) for status, _ in ended)), "".join(output for _, output in ended)


def kill_a_rank(run):
    processes = run.start()
    run.wait_for_checkpoint(processes)
    _kill(processes)


def kill_in_mid_save(run):
    processes = run.start()
    run.wait_for_checkpoint(processes)
    while processes[0].poll() is None and not list(run.checkpoints.glob(".iter-*.writing")):
        pass
    time.sleep(random.uniform(0, 0.005))
    _kill(processes)


def _ranks(processes):
    """Process ids of the ranks that train; none where the run has ended."""
    if processes[0].poll() is not None:
        return []
    return rank_pids(processes[0]) if len(processes) == 1 else [process.pid for process in processes]


def _kill(processes):
    if ranks := _ranks(processes):
        os.kill(random.choice(ranks), signal.SIGKILL)
    finish_all(processes)


def lose_a_rank_for_good(run):
    """A node does not come back: the run goes on with the rank that is left, and rounds otherwise."""
    kill_a_rank(run)
    run.launch = partial(run.launch, ranks=1)
    run.words.append("--elastic")
    run.tolerance = 1e-5


def truncate_the_newest(run):
    kill_a_rank(run)
    file = _newest_file(run)
    os.truncate(file, random.randrange(file.stat().st_size))


def flip_a_bit_of_the_newest(run):
    kill_a_rank(run)
    file = _newest_file(run)
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def _newest_file(run):
    return random.choice(sorted(max(run.checkpoints.glob("iter-*")).iterdir()))


def fill_the_disk(run):
    """The run's folder is a small file system of its own, which has room for two checkpoints but not for a third."""
    mount(run.folder, 2 * CHECKPOINT_BYTES + 300_000)
    status, output = finish_all(run.start())
    assert status != 0 and "No space left on device" in output, output
    subprocess.run(["mount", "-o", "remount,size=100m", str(run.folder)], check=True)


def fill_the_disk_of_the_events(run):
    """Events, log and summary have little room, checkpoints have plenty: the run trains to its last step."""
    mount(run.checkpoints.parent, 40_000)
    mount(run.checkpoints, 100_000_000)
    status, output = finish_all(run.start())
    assert status != 0 and (run.checkpoints / f"iter-{ITERATIONS:08d}").is_dir(), output
    assert output.count("TensorBoard's events cannot be written from here on: No space left on device") == 1, output
    assert output.count("metrics of this rank cannot be written from here on: No space left on device") <= 2, output
    assert "Traceback" not in output.split("error: rank 0: ")[0], output  # torchrun's own comes last
    subprocess.run(["mount", "-o", "remount,size=100m", str(run.checkpoints.parent)], check=True)


def mount(folder, size):
    """Make a folder a file system of its own of so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)


def stop_a_rank_for_a_while(run):
    processes = run.start()
    run.wait_for_checkpoint(processes)
    if ranks := _ranks(processes):
        rank = random.choice(ranks)
        os.kill(rank, signal.SIGSTOP)
        time.sleep(2)
        os.kill(rank, signal.SIGCONT)
    _kill(processes)


def put_a_folder_in_place_of_a_shard(run):
    """A path that nobody can read: root may read any file."""
    kill_a_rank(run)
    file = _newest_file(run)
    file.unlink()
    file.mkdir()


FAULTS = {
    "rank killed": kill_a_rank,
    "rank killed in mid-save": kill_in_mid_save,
    "rank lost for good": lose_a_rank_for_good,
    "newest checkpoint truncated": truncate_the_newest,
    "bit flipped in newest checkpoint": flip_a_bit_of_the_newest,
    "disk full while saving": fill_the_disk,
    "disk of the events full": fill_the_disk_of_the_events,
    "rank stopped for a while": stop_a_rank_for_a_while,
    "shard that cannot be read": put_a_folder_in_place_of_a_shard,
}


COLUMNS = ("injected", "resumed", "losses equal", "bytes lost")
MOUNTING = ("disk full while saving", "disk of the events full")


def can_mount():
    """Tell whether this process may make the small file systems of full disks (root on Linux may)."""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode == 0
        if made:
            subprocess.run(["umount", folder], check=True)
    return made


def inject(fault, data, folder, undisturbed, launch=by_torchrun):
    """One fault in one run; returns a row of the table."""
    run = Run(data, folder, launch)
    try:
        FAULTS[fault](run)
        lost = sum(file.stat().st_size for file in _unusable(run.checkpoints))
        output = run.finish()
        return {
            "injected": 1,
            "resumed": "Resuming at iteration" in output,
            "losses equal": run.losses() == approx(undisturbed, rel=run.tolerance, abs=0),
            "bytes lost": lost,
        }
    finally:
        for folder in (run.checkpoints, run.checkpoints.parent, run.folder):
            if os.path.ismount(folder):
                subprocess.run(["umount", str(folder)], check=True)


def _unusable(checkpoints):
    """Files of checkpoints that are half written or damaged."""
    from training.checkpoints.files import CheckpointError, verify

    for folder in checkpoints.iterdir():
        try:
            if folder.name.startswith("."):
                raise CheckpointError
            verify(folder)
        except CheckpointError:
            yield from folder.iterdir()


def prepare(folder, launch=by_torchrun):
    """Config keys of sample data, and the losses of an undisturbed run."""
    data = make_data(folder / "data")
    run = Run(data, folder / "undisturbed", launch)
    run.finish()
    return data, run.losses()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults that are called so: 'rank killed'")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault and (fault not in MOUNTING or can_mount())]
    totals = {fault: Counter() for fault in faults}
    with tempfile.TemporaryDirectory() as folder:
        data, undisturbed = prepare(Path(folder))
        for number in range(options.rounds):
            for fault in faults:
                row = inject(fault, data, Path(folder) / "run", undisturbed)
                totals[fault].update(row)
                print(f"round {number + 1}: {fault}: {row}", flush=True)
                shutil.rmtree(Path(folder) / "run")
        for phase in PHASES:
            if options.only in phase:
                stop_in(phase, data, Path(folder) / "run")
                print(f"signal in {phase}: ended with a line, and made up by the same command", flush=True)
    print("\n" + f"{'fault':<34}" + "".join(f"{name:>14}" for name in COLUMNS))
    for fault, counts in totals.items():
        print(f"{fault:<34}" + "".join(f"{counts[name]:>14}" for name in COLUMNS))
    if not can_mount():
        print(f"{', '.join(MOUNTING)}: skipped, they need the right to mount a file system (root)")
    sys.exit(0 if all(counts["losses equal"] == options.rounds for counts in totals.values()) else 1)


if __name__ == "__main__":
    main()
