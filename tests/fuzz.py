"""Feed every reader and every command hostile input: it takes it, or says in a line what is wrong.

    make fuzz MINUTES=10        or        python -m tests.fuzz --minutes 10

Files are damaged copies of good ones, command lines have options with values that no one should give. A command may end
with status 0 or 2, within a minute, with at most three lines of errors, without a traceback, and writes nothing outside
its own folder.
"""

import argparse
import collections
import contextlib
import functools
import gzip
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
import yaml

from docs.examples import zarr_years
from tests.conftest import TINY, make_data, words_of
from tests.support import forked, programs
from tests.support.era5_examples import build, save_netcdf, save_zarr
from tools.benchmarks.scaling import build_runs
from tools.planner.compare import compare
from tools.planner.hardware import load_gpu
from tools.timeline import Trace
from training.checkpoints.files import MARKER, CheckpointError, digest, read_marker
from training.run.folder import read_summary
from utils.config import Config, load_config
from utils.errors import UsageError
from utils.launch import read_launch
from weather.checks.statistics import read_statistics
from weather.prepare_era5 import Era5
from weather.sample_data import make_sample_data
from weather.years.dataset import FieldDataset

HOSTILE = [
    "", "0", "-1", "-0.0", "nan", "inf", "-inf", "1e400", "1e-400", "99999999999999999999", "2147483648", "0x10",
    "1_000", "true", "null", "~", "[]", "[1, 2]", "[" * 2000, "{}", "{a: b}", "{" * 500, "&a [*a]", "*a", "!!int abc",
    "!!python/name:os", "2020-13-45", "..", "../..", "/", "/dev/null", "/etc/passwd", "nowhere", "a" * 5000, "a\nb",
    "\x1b[31m", "\x00", "é\udce9", "%s%n", "$(id)", "'\"", "auto", "cuda", "tp2", "1..2", "16..8", "1980-1979",
]  # fmt: skip
ATOMS = [word.encode(errors="surrogateescape") for word in HOSTILE]
EXAMPLE = Path("example_logs/demo/example")
CHANCE_OF_A_LOST_FILE = 0.1  # of several
VARIABLES = [
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "SLURM_LAUNCH_NODE_IPADDR",
]  # fmt: skip


def damaged(data, chance):
    """A copy of some bytes with a few changes: cut, flipped, replaced or with something hostile inside."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                del data[at:]
            case 1 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 2:
                data[at:at] = chance.choice(ATOMS)
            case 3:
                data[at : at + chance.randrange(1, 40)] = chance.choice(ATOMS)
            case _:
                data[at:at] = data[: chance.randrange(1, 200)]
    return bytes(data)


def with_a_strange_value(data, chance):
    """A copy of a JSON or YAML file in which a value is of another kind or gone."""
    tree = yaml.safe_load(data)
    place, key = [tree], 0
    while isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
        place = place[key]
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if chance.random() < 0.1:
        del place[key]
    else:
        place[key] = chance.choice([None, True, -1, 0, 10**400, 1e308, math.nan, math.inf, "", [], {}, [[]], *HOSTILE])
    return json.dumps(tree).encode()


def good_files(folder):
    """{kind: (what is given to the reader, {name inside it, '' for a file: bytes}, read(path))}."""
    np.save(folder / "means.npy", np.ones((1, 20, 1, 1), np.float32))
    marker = {"iteration": 3, "val_loss": 0.5, "world_size": 1, "config": {}, "trainer": {}, "files": {}}
    summary = {"config": "quick", "run": "logs/quick/00", "iterations": 3, "world_size": 1, "units": {}}
    calls = {"ph": "X", "ts": 1.0, "dur": 5.0, "cat": "user_annotation", "args": {}}
    trace = {"distributedInfo": {"rank": 0, "world_size": 2}, "baseTimeNanoseconds": 7, "collectives": [
        {"operation": "all_reduce", "group": "0", "number": 1}
    ], "traceEvents": [calls | {"name": name} for name in ("step", "forward", "gloo:all_reduce")]}  # fmt: skip

    def read_trace(path):
        packed = path.with_suffix(".gz")
        packed.write_bytes(gzip.compress(path.read_bytes(), 1))
        Trace(packed)

    one = {
        "config": (Path("config/ViT.yaml").read_bytes(), lambda path: load_config([f"--yaml_config={path}"])),
        "hardware": (Path("config/hardware.yaml").read_bytes(), lambda path: load_gpu("a100-40gb", path)),
        "study": (Path("config/scaling.yaml").read_bytes(), lambda path: build_runs(str(path), "quick", [])),
        "statistics": ((folder / "means.npy").read_bytes(), lambda path: read_statistics(path, 20)),
        MARKER: ({"sha256": digest(marker), **marker}, lambda path: read_marker(path.parent)),
        "summary": (summary, lambda path: read_summary(path, run=str, units=dict)),
        "trace.json": (trace, read_trace),
    }
    found = {}
    for name, (data, read) in one.items():
        found[name] = Path(name, name), {"": json.dumps(data).encode() if isinstance(data, dict) else data}, read
    run = {name: (EXAMPLE / name).read_bytes() for name in ("config.yaml", "summary.json")}

    def read_run(path):
        shutil.copy(EXAMPLE / "metrics-rank0.jsonl", path)  # a run's own, which is read plainly
        compare(path, "a100-40gb")

    return found | {"run": (Path("run"), run, read_run)}


@functools.cache
def good_stores():
    """As good_files: a year as year files and Zarr stores, and two days of ERA5 as others publish them."""
    found = {}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(action="ignore"):
        folder = Path(name)
        (folder / "era5").mkdir()
        data = build(years=[1979]).isel(valid_time=slice(2))
        save_netcdf(data, folder / "era5/netcdf4")
        save_netcdf(data, folder / "era5/netcdf3", "scipy")
        for version in ("v2", "v3"):
            save_zarr(data, folder / f"era5/zarr-{version}", version)
        make_sample_data(folder, (8, 16), [1979], [1981], [1982], days=1, seed=1)
        for version, compressed in itertools.product((2, 3), (False, True)):
            zarr_years.write_store(
                folder / "train/1979.h5", folder / f"{version}{compressed}.zarr", version, compressed
            )
        with h5py.File(folder / "train/1979.h5") as whole, h5py.File(folder / "pieces.h5", "w") as file:
            for field in whole:
                whole.copy(field, file, field)
            del file["fields"]
            file.create_dataset("fields", data=whole["fields"][:], chunks=(1, 1, 8, 16), compression="gzip")
        for store in (folder / "train/1979.h5", folder / "pieces.h5", *folder.glob("*.zarr")):
            found[store.name] = Path(store.suffix[1:], f"1979{store.suffix}"), files_of(store), read_year
        for store in (folder / "era5").iterdir():
            found[store.name] = Path("era5"), files_of(store), read_era5
    return found


def files_of(store):
    """{name inside the store, '' for a file: bytes}."""
    return {str(file.relative_to(store)): file.read_bytes() for file in (store, *store.rglob("*")) if file.is_file()}


def write_damaged(path, files, chance):
    """Write files of which one is damaged or gone."""
    files = dict(files)
    hit = chance.choice([name for name in files if "." in name or len(files) == 1])
    if len(files) > 1 and chance.random() < CHANCE_OF_A_LOST_FILE:
        del files[hit]
    else:
        strange = files[hit][:1] in b"{#" and len(files) == 1 and chance.random() < 0.5
        files[hit] = (with_a_strange_value if strange else damaged)(files[hit], chance)
    put(path, files)


def put(path, files):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def read_year(path):
    dataset = FieldDataset(path.parent, 2, (8, 16))
    try:
        dataset.dates([0], 1)
        dataset.read(0, np.empty(dataset.shape, np.float32))
    finally:
        dataset.close()


def read_era5(path):
    era5 = Era5([path])
    times = np.array(["1979-01-01T00", "1979-01-01T06"], "datetime64[s]")
    era5.check(times)
    era5.frames(times)


def read_damaged(chance, folder, kind):
    path, files, read = (good_stores() | good_files(folder))[kind]
    write_damaged(folder / path, files, chance)
    with contextlib.redirect_stdout(None), warnings.catch_warnings(action="ignore"):
        read(folder / path)


def read_strange_environment(chance):
    """Any of the launchers' variables with any value."""
    chosen = chance.sample(VARIABLES, chance.randrange(1, len(VARIABLES)))
    read_launch({name: chance.choice([*HOSTILE, "1", "2", "4", "127.0.0.1"]) for name in chosen})


def strange_command(chance, folder, data):
    """The words of a command with one to three options that are hostile."""

    def hostile(options):
        return [f"--{chance.choice(options)}={chance.choice(HOSTILE)}" for _ in range(chance.randrange(1, 4))]

    tiny = words_of(TINY | data | {"num_iters": 2, "warmup": 0, "expdir": folder / "logs"})
    keys = sorted(set(Config.model_fields) - {"expdir", "num_iters", "comm_timeout", "depth", "model"})
    commands = [
        ["train.py", *tiny, *hostile(keys)],
        ["train_mp.py", *tiny, "--yaml_config=config/ViT.yaml", *hostile(keys)],
        ["train_shard.py", *tiny, "--yaml_config=config/ViT.yaml", *hostile(keys)],
        ["forecast.py", *hostile(["run_folder", "checkpoint", "dates", "starts", "lead_hours", "channel", "split"])],
        ["plan.py", *hostile(["gpus", "gpu", "top", "calibrate", "yaml_config", "config", *keys])],
        ["benchmark.py", "layouts", "mp", "--device=cpu", "--rounds=1", "--steps=1", *hostile(["layouts"])],
        ["benchmark.py", "scaling", *hostile(["study", "study_file", "only"])],
        ["-m", "tools.checkpoint", "show", chance.choice(HOSTILE)],
        ["-m", "tools.hang", chance.choice(HOSTILE)],
        ["-m", "tools.timeline", chance.choice(HOSTILE)],
        ["plan.py", "compare", chance.choice(HOSTILE)],
        ["-m", "weather.year_files", chance.choice(HOSTILE), f"{folder}/stats"],
        ["-m", "tools.preflight", f"--expdir={folder}/logs", *hostile(["timeout", "train_data_path"])],
        ["-m", "utils.layout", "--world_size=8", *hostile(["tensor_parallel", "domain_parallel", "dp_shard"])],
        ["-m", "weather.sample_data", f"{folder}/data", *hostile(["img_size", "days", "train_years", "seed"])],
    ]  # fmt: skip
    return [word.replace("\x00", "") for word in chance.choice(commands)]  # no system passes it on


def run_command(words, folder):
    """Run a command, which ends well or says in three lines at most what is wrong, and writes nothing here."""
    before = set(Path.cwd().rglob("*"))
    env = os.environ | {"TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = programs.run(words, env=env, timeout=60)
    finally:
        programs.end_all()
    allowed = (0, 1, 2) if "tools.preflight" in words else (0, 2)  # 1: a check has failed
    assert done.returncode in allowed and "Traceback" not in done.stderr, (words, done.returncode, done.stderr)
    assert done.returncode != 2 or len(done.stderr.strip().splitlines()) <= 3, (words, done.stderr)
    others = {".git", "__pycache__"}  # tests that run beside this one write bytecode
    new = [str(path) for path in set(Path.cwd().rglob("*")) - before if others.isdisjoint(path.parts)]
    assert not new, (words, new)


@functools.cache
def process_apart():
    """A process in which the HDF5 library may loop or crash: some damage makes it."""
    return forked.context().Pool(1)


def fuzz_readers(chance, folder):
    """One input to one reader; raises what the reader lets through. Returns what was read."""
    kind = chance.choice(["environment", *good_files(folder), *good_stores()])
    with contextlib.suppress(UsageError, CheckpointError):
        if kind == "environment":
            read_strange_environment(chance)
        elif kind not in good_stores():
            read_damaged(chance, folder, kind)
        else:
            result = process_apart().apply_async(read_damaged, (random.Random(chance.getrandbits(32)), folder, kind))
            try:
                result.get(60)
            except multiprocessing.TimeoutError:
                process_apart().terminate()
                process_apart.cache_clear()
                return "HDF5 loops or crashes"
    return kind


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        folder, end = Path(name), time.monotonic() + 60 * options.minutes
        data = make_data(folder / "data")
        for seed in itertools.count(options.seed):
            if time.monotonic() > end:
                break
            chance = random.Random(seed)
            try:
                counts[fuzz_readers(chance, folder)] += 1
                if seed % 50 == 0:
                    counts["commands"] += 1
                    run_command(strange_command(chance, folder, data), folder)
            except Exception as error:
                counts["failed"] += 1
                print(f"--seed {seed}: {type(error).__name__}: {error}"[:3000], flush=True)
    print(dict(counts))
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
