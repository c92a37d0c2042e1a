"""Stop programs in every phase that may be long: each ends soon, with one line and its status, and can be repeated."""

import json
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import xarray

from tests.conftest import TINY, words_of
from tests.support import programs
from tests.support.launch import losses
from utils.errors import STOPPED_STATUS

TRAINING = {"num_iters": 12, "warmup": 2, "validate_every": 1}
WHOLE_STEPS = "training.tasks.validation:ForecastValidator.whole_steps"  # of a batch
TERMINATED = 128 + signal.SIGTERM


class Phase(NamedTuple):
    """place, call: where the signal comes, as of tests/support/interrupted.py. program: its words. status: of its end.

    ranks: of the program. same: of the folder of results, what the repeated command must give.
    """

    place: str
    call: int
    program: str
    status: int
    ranks: int = 1


LOOK_AT_DATA = "weather.checks.data_check:CheckedDataset.read"
PHASES = {
    "data check": Phase(LOOK_AT_DATA, 3, "train", STOPPED_STATUS),
    "data check, two ranks": Phase(LOOK_AT_DATA, 3, "train", STOPPED_STATUS, ranks=2),
    "first step": Phase("training.step.step:TrainingStep.run_step", 1, "train", STOPPED_STATUS),
    "first step, two ranks": Phase("training.step.step:TrainingStep.run_step", 1, "train", STOPPED_STATUS, ranks=2),
    "compilation": Phase("torch._dynamo.convert_frame:compile_frame", 1, "compiled", STOPPED_STATUS),
    "validation": Phase(WHOLE_STEPS, -2, "train", STOPPED_STATUS),
    "validation, tensor parallel": Phase(WHOLE_STEPS, -2, "tensor parallel", STOPPED_STATUS, ranks=2),
    "validation, context parallel": Phase(WHOLE_STEPS, -2, "context parallel", STOPPED_STATUS, ranks=2),
    "validation, pipeline parallel": Phase(WHOLE_STEPS, -2, "pipeline parallel", STOPPED_STATUS, ranks=2),
    "sample data": Phase("weather.sample.atmosphere:Atmosphere.frames", 2, "sample data", STOPPED_STATUS),
    "conversion": Phase("weather.sources.data:SourceData.frames", 2, "conversion", STOPPED_STATUS),
    "statistics": Phase("weather.convert.training_statistics:StatisticsSums.add", 1, "statistics", TERMINATED),
    "forecast": Phase("training.forecasting.rollout:Rollout.next_state", 3, "forecast", TERMINATED),
    "plan search": Phase("tools.planner.plan:trace_step", 1, "plan", TERMINATED),
}


def commands(data, folder):
    """{program: its words}; all write into `folder`. data: config keys of sample data."""
    logs = {"expdir": folder / "logs"}
    train = ["train.py", *words_of(TINY | data | TRAINING | logs)]
    split = ["train_mp.py", *train[1:], "--yaml_config", "config/ViT.yaml", "--checkpoint_every", "10"]
    source = folder / "own.nc"
    return {
        "train": train,
        "tensor parallel": [*split, "--tensor_parallel", "2"],
        "context parallel": [*split, "--context_parallel", "2"],
        "pipeline parallel": [*split, "--pipeline_parallel", "2", "--gradient_accumulation", "2"],
        "compiled": [*train, "--enable_jit"],
        "sample data": f"-m weather.sample_data {folder}/sample --img_size 16 32 --train_years 1979 --days 2".split(),
        "conversion": f"-m weather.prepare_data {source} --variables t2m --out {folder}/converted".split(),
        "statistics": f"-m weather.year_files {data['train_data_path']} {folder}/stats".split(),
        "forecast": f"forecast.py --run_folder {folder}/logs/quick/00 --starts 2 --lead_hours 24".split(),
        "plan": ["plan.py", "--config=short", "--gpus", "8", "--top", "2"],
    }


def write_source(path):
    """A file of one variable, for prepare_data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    time = np.arange("2001-01-01", "2001-02-01", np.timedelta64(6, "h"), dtype="datetime64[h]").astype("datetime64[ns]")
    axes = {"time": time, "latitude": np.linspace(90, -90, 9), "longitude": np.arange(0, 360, 22.5)}
    values = np.random.default_rng(0).normal(280, 5, [len(axis) for axis in axes.values()]).astype("f4")
    xarray.Dataset({"t2m": (tuple(axes), values, {"units": "K"})}, axes).to_netcdf(path)


def run(words, ranks):
    """[(exit status, output)] of the ranks of a program."""
    if ranks > 1:
        return programs.run_ranks(words, ranks)
    done = programs.run(words)
    return [(done.returncode, done.stdout + done.stderr)]


def results(program, folder):
    """What a program has made, to be compared."""
    if program == "forecast":
        (scores,) = folder.rglob("skill.json")
        return json.loads(scores.read_text())["rmse"]
    if list(folder.rglob("summary.json")):
        return losses(folder, "00")
    made = {}
    for path in sorted(folder.rglob("*.h5")):
        with h5py.File(path) as file:
            made[path.name] = file["fields"][:].tobytes()
    return made


def stop_in(name, data, folder):
    """Stop a program in a phase, start it again, and compare with an undisturbed one. Raises AssertionError."""
    phase = PHASES[name]
    ends = []
    for kind in ("whole", "parts"):
        own = Path(folder) / kind
        write_source(own / "own.nc")
        every = commands(data, own)
        words = every[phase.program]
        if phase.program == "forecast":
            assert run(every["train"], 1)[0][0] == 0
        if kind == "parts":
            hook = ["-m", "tests.support.interrupted", phase.place, phase.call, signal.SIGTERM.value, *words]
            for status, output in run(hook, phase.ranks):
                assert status == phase.status, (name, status, output)
                assert "Traceback" not in output, (name, output)
                assert output.count("error: ") <= 1, (name, output)
        for status, output in run(words, phase.ranks):
            assert status == 0, (name, status, output)
        ends.append(results(phase.program, own))
        assert not list(own.rglob("*.part")), name
    assert ends[0] == ends[1], name
    shutil.rmtree(folder)
