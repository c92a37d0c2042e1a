"""Feed every reader and every command hostile input: it takes it, or says in a line what is wrong.

    make fuzz MINUTES=10        or        python -m tests.fuzz --minutes 10

Files are damaged copies of good ones, year files have metadata of any kind, command lines have options with values that
no one should give. A command may end with status 0 or 2, within a minute, with at most three lines of errors, without a
traceback, and writes nothing outside its own folder.
"""

import argparse
import collections
import contextlib
import functools
import gzip
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
import yaml

from docs.examples import zarr_years
from tests.conftest import TINY, words_of
from tests.support import forked, programs
from tests.support.era5_examples import build, save_netcdf, save_zarr
from tests.test_plan_measured import made
from tools import hang
from tools.benchmarks.scaling import read_study
from tools.forecasting.dated_frames import file_times
from tools.forecasting.output_files import prepare_folder
from tools.planner.compare import compare
from tools.planner.hardware import load_gpu, of_measured
from tools.timeline import Trace
from training.checkpoint_files import MARKER, CheckpointError, digest, read_marker
from training.loggers import FILE_NAME
from training.run_folder import read_summary
from utils.config import Config, load_config
from utils.errors import UsageError
from utils.launch import read_launch
from weather.dataset import FieldDataset, read_statistics
from weather.prepare_era5 import Era5
from weather.sample_data import make_sample_data

HOSTILE = [
    "", "0", "-1", "-0.0", "nan", "inf", "-inf", "1e400", "1e-400", "99999999999999999999", "2147483648", "0x10",
    "1_000", "true", "null", "~", "[]", "[1, 2]", "[" * 2000, "{}", "{a: b}", "{" * 500, "&a [*a]", "*a", "!!int abc",
    "!!python/name:os", "2020-13-45", "..", "../..", "/", "/dev/null", "/etc/passwd", "nowhere", "a" * 5000, "a\nb",
    "\x1b[31m", "\x00", "é\udce9", "%s%n", "$(id)", "'\"", "auto", "cuda", "tp2", "1..2", "16..8", "1980-1979",
]  # fmt: skip
ATOMS = [word.encode(errors="surrogateescape") for word in HOSTILE]
EXAMPLE, METRICS = Path("example_logs/demo/example"), FILE_NAME.format(0)
CHANCE_OF_A_LOST_FILE = 0.1  # of a store
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
    """{reader's name: (a good file's bytes, read(path))}."""
    np.save(folder / "means.npy", np.ones((1, 20, 1, 1), np.float32))
    marker = {"iteration": 3, "val_loss": 0.5, "world_size": 1, "config": {}, "trainer": {}, "files": {}}
    summary = {"config": "quick", "run": "logs/quick/00", "iterations": 3, "world_size": 1, "units": {}}
    call = {"group": "0", "number": 1, "operation": "all_reduce", "tensors": ["Float(3,)"], "done": False}
    record = {"rank": 0, "world_size": 2, "start": "1", "reason": "", "at": ["train.py:7 main"], "calls": [call]}
    record["groups"] = {"0": ["default_pg", [0, 1]]}
    calls = {"ph": "X", "ts": 1.0, "dur": 5.0, "cat": "user_annotation", "args": {}}
    trace = {"distributedInfo": {"rank": 0, "world_size": 2}, "baseTimeNanoseconds": 7, "collectives": [
        {"operation": "all_reduce", "group": "0", "number": 1}
    ], "traceEvents": [calls | {"name": name} for name in ("step", "forward", "gloo:all_reduce")]}  # fmt: skip

    def as_marker(path):
        shutil.copyfile(path, path.with_name(MARKER))
        read_marker(path.parent)

    def as_record(path):
        shutil.copyfile(path, path.with_name("collectives-rank0.json"))
        hang.main([str(path.parent)])

    def as_skill(path):
        shutil.copyfile(path, path.with_name("skill.json"))
        prepare_folder(path.parent)

    def of_run(name):
        """Compares a run with the plan of its config; the damaged file is one of them."""

        def as_file_of_run(path):
            shutil.copyfile(path, folder / name)
            for other in {"config.yaml", "summary.json", METRICS} - {name}:
                shutil.copyfile(EXAMPLE / other, folder / other)
            compare(folder, "a100-40gb")

        return as_file_of_run

    def as_trace(path):
        path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        Trace(path.with_suffix(".gz"))

    return {
        "config": (Path("config/ViT.yaml").read_bytes(), lambda path: load_config([f"--yaml_config={path}"])),
        "hardware": (Path("config/hardware.yaml").read_bytes(), lambda path: load_gpu("a100-40gb", path)),
        "study": (Path("config/scaling.yaml").read_bytes(), lambda path: read_study(str(path), "quick")),
        "statistics": ((folder / "means.npy").read_bytes(), lambda path: read_statistics(path, 20)),
        "marker": (json.dumps({"sha256": digest(marker), **marker}).encode(), as_marker),
        "summary": (json.dumps(summary).encode(), lambda path: read_summary(path, run=str, units=dict)),
        "collectives": (json.dumps(record).encode(), as_record),
        "skill": (b'{"files": ["a.nc"]}', as_skill),
        "measured": (json.dumps(made()).encode(), lambda path: of_measured("measured", path)),
        "trace": (json.dumps(trace).encode(), as_trace),
    }


def read_damaged(chance, folder, name=None):
    """One damaged file for a reader; returns the reader's name."""
    files = good_files(folder)
    data, read = files[name := name or chance.choice(sorted(files))]
    path = folder / "damaged"
    harm = with_a_strange_value if data[:1] in b"{#" and chance.random() < 0.5 else damaged
    path.write_bytes(harm(data, chance))
    with contextlib.redirect_stdout(None):
        read(path)
    return name


def read_strange_year(chance, folder):
    """A year file whose datasets may be of any type, size and content."""

    def strange(good):
        values = [
            good, good[:-1], good.astype("S3"), good.astype("i8"), np.full(good.shape, np.nan), good.reshape(-1, 1),
            good[:0], np.array(7), np.array("text", "S4"), good * 1e30, np.zeros((2, 2, 2), [("a", "f4")]),
        ]  # fmt: skip
        return chance.choice(values) if chance.random() < 0.5 else good

    path = folder / "train" / "1979.h5"
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        fields = np.ones((4, 2, 4, 8), "f4")
        if chance.random() < 0.3:
            fields = chance.choice([fields.astype("f8"), fields.astype("i4"), fields[0], fields[:1], fields[:, :0]])
        if chance.random() < 0.9:
            file.create_dataset("fields", data=fields, chunks=chance.choice([None, True]) if fields.size else None)
        for name, good in {"latitude": np.linspace(90, -90, 4), "longitude": np.arange(8) * 45.0}.items():
            if chance.random() < 0.8:
                file[name] = strange(good)
        for name in ("channel", "channel_units"):
            if chance.random() < 0.8:
                file[name] = chance.choice([["a", "b"], ["a"], [1, 2], "a", ["a\x1b", "b" * 5000], np.zeros((2, 2))])
        if chance.random() < 0.5:
            file["time"] = strange(np.arange(4))
            file["time"].attrs["units"] = chance.choice(
                ["hours since 1979-01-01", "hours since then", 7, ["a", "b"], ""]
            )
    read_year(path)


@functools.cache
def good_stores():
    """{kind: {name inside the store, '' for a file: bytes}} of the same two days of ERA5, as others publish them."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        data, path = build(years=[1979]).isel(valid_time=slice(2)), Path(folder)
        save_netcdf(data, path / "netcdf4")
        save_netcdf(data, path / "netcdf3", "scipy")
        for version in ("v2", "v3"):
            save_zarr(data, path / f"zarr-{version}", version)
        return {kind.name: files_of(kind) for kind in path.iterdir()}


def files_of(store):
    """{name inside the store, '' for a file: bytes}."""
    return {str(file.relative_to(store)): file.read_bytes() for file in (store, *store.rglob("*")) if file.is_file()}


def write_damaged(store, files, chance):
    """Write a store of which a file is damaged or gone."""
    files = dict(files)
    hit = chance.choice([name for name in files if "." in name or len(files) == 1])
    if len(files) == 1 or chance.random() >= CHANCE_OF_A_LOST_FILE:
        files[hit] = damaged(files[hit], chance)
    else:
        del files[hit]
    shutil.rmtree(store) if store.is_dir() else store.unlink(missing_ok=True)
    for name, data in files.items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(data)


def read_damaged_store(chance, folder):
    """A NetCDF file or Zarr store of ERA5, of which a file is damaged."""
    store = folder / "store"
    write_damaged(store, good_stores()[chance.choice(sorted(good_stores()))], chance)
    with warnings.catch_warnings(action="ignore"):
        era5 = Era5([store])
        times = np.array(["1979-01-01T00", "1979-01-01T06"], "datetime64[s]")
        era5.check(times)
        era5.frames(times)


@functools.cache
def good_years():
    """Bytes of small year files: contiguous, and in compressed pieces."""
    years = []
    for options in ({}, {"chunks": (1, 2, 4, 8)}, {"chunks": (1, 1, 4, 8), "compression": "gzip"}):
        with io.BytesIO() as buffer:
            with h5py.File(buffer, "w") as file:
                file.create_dataset("fields", data=np.ones((4, 2, 4, 8), "f4"), **options)
                file["latitude"], file["longitude"] = np.linspace(90, -90, 4), np.arange(8) * 45.0
                file["channel"] = ["a", "b"]
            years.append(buffer.getvalue())
    return years


def read_damaged_year(chance, folder):
    """A year file whose bytes are damaged."""
    path = folder / "train" / "1979.h5"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(damaged(chance.choice(good_years()), chance))
    read_year(path)


@functools.cache
def good_zarr_years():
    """Small years as Zarr stores: {name inside the store: bytes}."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        path = Path(folder)
        make_sample_data(path, (8, 16), [1979], [1981], [1982], days=1, seed=1)
        for number, (version, compressed) in enumerate(itertools.product((2, 3), (False, True))):
            zarr_years.write_store(path / "train/1979.h5", path / f"{number}.zarr", version, compressed)
        return [files_of(store) for store in path.glob("*.zarr")]


def read_damaged_zarr_year(chance, folder):
    """A year in a Zarr store, of which a file is damaged or gone."""
    path = folder / "zarr" / "1979.zarr"
    write_damaged(path, chance.choice(good_zarr_years()), chance)
    with warnings.catch_warnings(action="ignore"):
        read_year(path)


def read_year(path):
    dataset = FieldDataset(path.parent, 2, (4, 8))
    try:
        file_times(dataset.files[0])
        dataset.read(0, np.empty(dataset.shape, np.float32))
    finally:
        dataset.close()


def read_strange_environment(chance, _folder):
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
        ["benchmark.py", "layouts", "mp", "--device=cpu", *hostile(["layouts", "rounds", "steps", "sizes"])],
        ["benchmark.py", "layouts", "dp", "--device=cpu", *hostile(["layouts", "rounds", "steps", "sizes"])],
        ["benchmark.py", "scaling", *hostile(["study", "study_file", "only"])],
        ["-m", "tools.checkpoint", "show", chance.choice(HOSTILE)],
        ["-m", "tools.hang", chance.choice(HOSTILE)],
        ["-m", "tools.timeline", chance.choice(HOSTILE)],
        ["plan.py", "compare", chance.choice(HOSTILE)],
        ["-m", "weather.year_files", chance.choice(HOSTILE), f"{folder}/stats"],
        ["-m", "tools.preflight", f"--expdir={folder}/logs", *hostile(["timeout", "train_data_path"])],
        ["-m", "utils.comm", "--world_size=8", *hostile(["tensor_parallel", "domain_parallel", "dp_shard"])],
        ["-m", "weather.sample_data", f"{folder}/data", *hostile(["img_size", "days", "train_years", "seed"])],
    ]  # fmt: skip
    return [word.replace("\x00", "") for word in chance.choice(commands)]  # no system passes it on


def run_command(words, folder):
    """Run a command; returns what is wrong with how it ended, '' if nothing is."""
    before = set(Path.cwd().rglob("*"))
    env = os.environ | {"TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = programs.run(words, env=env, timeout=60)
    except subprocess.TimeoutExpired:
        return "it hangs"
    finally:
        programs.end_all()
    said = done.stderr.strip().splitlines()
    allowed = (0, 1, 2) if "tools.preflight" in words else (0, 2)  # 1: a check has failed
    if done.returncode not in allowed or "Traceback" in done.stderr or (done.returncode == 2 and len(said) > 3):
        return f"status {done.returncode}: {done.stderr[-2000:]}"
    new = [str(path) for path in set(Path.cwd().rglob("*")) - before if ".git" not in path.parts]
    return f"it wrote {new}" if new else ""


APART = (read_damaged_year, read_damaged_zarr_year, read_damaged_store)
READERS = (read_damaged, read_strange_year, read_strange_environment, *APART)


@functools.cache
def process_apart():
    """A process in which the HDF5 library may loop or crash: some damage makes it."""
    return forked.context().Pool(1)


def fuzz_readers(chance, folder):
    """One input to one reader; raises what the reader lets through. Returns the reader's name."""
    reader = chance.choice(READERS)
    with contextlib.suppress(UsageError, CheckpointError):
        if reader not in APART:
            reader(chance, folder)
            return reader.__name__
        result = process_apart().apply_async(reader, (random.Random(chance.getrandbits(32)), folder))
        try:
            result.get(60)
        except multiprocessing.TimeoutError:
            process_apart().terminate()
            process_apart.cache_clear()
            return "HDF5 loops or crashes"
    return reader.__name__


def data_of(folder):
    """The options that name the sample data in a folder, which is made."""
    make_sample_data(folder, (16, 32), [1979], [1981], [1982], days=5, seed=1)
    parts = {"train": "train", "valid": "valid", "inf": "test"}
    data = {f"{key}_data_path": folder / part for key, part in parts.items()}
    return data | {f"{k}_path": folder / f"stats/{k}.npy" for k in ("global_means", "global_stds", "time_means")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    counts, failures, seeds = collections.Counter(), 0, itertools.count(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = data_of(folder / "data")
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            for seed in itertools.islice(seeds, 50):
                try:
                    counts[fuzz_readers(random.Random(seed), folder)] += 1
                except Exception as error:
                    failures += 1
                    print(f"--seed {seed}: {type(error).__name__}: {error}"[:1000], flush=True)
            words = strange_command(random.Random(seed), folder, data)
            counts["commands"] += 1
            if wrong := run_command(words, folder):
                failures += 1
                print(f"--seed {seed}: {words}: {wrong}"[:3000], flush=True)
    print(f"{dict(counts)}, {failures} failed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
