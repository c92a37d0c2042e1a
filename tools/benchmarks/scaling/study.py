"""A scaling study as its file describes it: families of runs of the training scripts, checked before any starts."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from tools.planner.layouts import script_of
from utils.config import SCRIPTS, explain, load_config, nearest, option_words, read_named_config
from utils.errors import UsageError, reported_as_usage_error
from utils.schema import Config, Text, key

SUBMIT = "submit_scaling.sh"
OF_THE_STUDY = ("config", "run_num", "global_batch_size", "local_batch_size")  # set by the study, not by options
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")]
OneOrMore = BeforeValidator(lambda value: value if isinstance(value, list) else [value])


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Layout(_Strict):
    """A layout of a run, on one or several numbers of ranks."""

    ranks: Annotated[list[PositiveInt], OneOrMore, Field(min_length=1)] = key("ranks of the run; a list: of each run")
    options: dict[str, Any] = key("keys of the config that make the layout", {})


class Family(_Strict):
    """Runs of the same problem, which are compared with the smallest among them."""

    scaling: Literal["strong", "weak"] = key("strong: the same batch on any number of ranks; weak: it grows with them")
    batch: PositiveInt = key("samples of an optimizer step: of all ranks (strong), for each rank (weak)")
    yaml_config: Text = key("file of the config", SCRIPTS["train.py"].yaml_config)
    config: Text = key("named config in that file")
    options: dict[str, Any] = key("keys of the config, for all runs of the family", {})
    layouts: dict[Name, Layout] = key("named layouts")


class Study(_Strict):
    """Families of runs, and their target."""

    name: Name = key("name of the study in the YAML file")
    about: Text = key("what it is about, in a line")
    gpus_per_node: PositiveInt = key("GPUs of a node, for jobs of Slurm", 4)
    target: Text | None = key("RMSE that counts as reached: z500=300", None)
    options: dict[str, Any] = key("keys of the config, for all runs", {})
    families: dict[Name, Family] = key("named families")


@dataclass(frozen=True)
class Target:
    """The RMSE of a field, in its units, that a run should reach. reason: where the number comes from."""

    field: str
    rmse: float
    reason: str

    def __str__(self) -> str:
        return f"{self.field} = {self.rmse:g} ({self.reason})"


@dataclass(frozen=True)
class Run:
    """One training run: `ranks` processes of `script` with `words`, which give `config`."""

    number: int
    name: str
    family: str
    layout: str
    scaling: str
    ranks: int
    script: str
    words: list[str]
    config: Config

    @property
    def folder(self) -> Path:
        """The run folder, which the training script makes."""
        return Path(self.config.expdir) / self.config.config / self.config.run_num

    @property
    def command(self) -> str:
        """The command that starts it on this machine."""
        start = "python" if self.ranks == 1 else f"torchrun --nproc_per_node {self.ranks}"
        return f"{start} {self.script} {shlex.join(self.words)}"


def read_study(path: str, name: str) -> Study:
    """The Study of this name in a YAML file.

    Raises UsageError, with the nearest known name, for an unknown study or key, and for values that do not fit.
    """
    settings = read_named_config(path, name)
    try:
        return Study.model_validate({**settings, "name": name})
    except ValidationError as error:
        raise UsageError(explain(error, Study, f"{path}: {name}")) from None


def build_runs(path: str, study: Study, words: list[str]) -> list[Run]:
    """The runs of a study in the order of its file, numbered from 0.

    words: options of the config for all runs; they win over the study's. Raises UsageError naming the run where the
    training script would refuse it.
    """
    runs: list[Run] = []
    for family_name, family in study.families.items():
        for layout_name, layout in family.layouts.items():
            options = {**study.options, **family.options, **layout.options}
            for ranks in layout.ranks:
                name = f"{family_name}-{layout_name}-{ranks}"
                with reported_as_usage_error(UsageError, f"{path}: {study.name}: {name}"):
                    script = script_of(options)
                    batch = family.batch * (ranks if family.scaling == "weak" else 1)
                    own = [
                        f"--config={family.config}",
                        f"--run_num={study.name}-{name}",
                        f"--global_batch_size={batch}",
                    ]
                    if family.yaml_config != SCRIPTS[script].yaml_config:
                        own.insert(0, f"--yaml_config={family.yaml_config}")
                    own += [word for option, value in options.items() for word in _words(option, value)] + words
                    config = load_config(own, None, ranks, *SCRIPTS[script][:2])
                runs.append(Run(len(runs), name, family_name, layout_name, family.scaling, ranks, script, own, config))
    if len({run.name for run in runs}) < len(runs):
        raise UsageError(f"{path}: {study.name}: a number of ranks is listed twice in a layout")
    return runs


def parse_target(text: str, where: str, reason: str) -> Target:
    """`z500=300` as a Target. Raises UsageError, beginning with `where`, for anything else."""
    field, _, number = text.partition("=")
    try:
        rmse = float(number)
    except ValueError:
        rmse = math.nan
    if not (field and 0 < rmse < math.inf):
        raise UsageError(f"{where}: target '{text}': expected a field and its RMSE, as z500=300")
    return Target(field, rmse, reason)


def _words(option: str, value: Any) -> list[str]:
    """The words that give an option of a study this value."""
    if option in OF_THE_STUDY:
        raise UsageError(f"option '{option}' is set by the study: by config, batch and the run's name")
    if option not in Config.model_fields:
        raise UsageError(f"unknown option '{option}'{nearest(option, Config.model_fields)}")
    return option_words(option, value)


def job_lines(runs: list[Run], gpus_per_node: int, words: list[str], out: Path) -> list[str]:
    """Lines of bash: an array of runs for each number of nodes and GPUs, and a last job that writes the report.

    All tasks of an array get the same nodes and GPUs. Each makes the run with its number and writes to
    <out>/run-<number>.out. words: options of benchmark.py scaling, for every job. Raises UsageError where a run does
    not fill its nodes.
    """
    arrays: dict[tuple[int, int], list[int]] = {}
    for run in runs:
        nodes, gpus = -(-run.ranks // gpus_per_node), min(run.ranks, gpus_per_node)
        if nodes * gpus != run.ranks:
            raise UsageError(f"{run.name}: {run.ranks} ranks do not fill nodes of {gpus_per_node} GPUs")
        arrays.setdefault((nodes, gpus), []).append(run.number)
    given = shlex.join(words)
    lines = [
        f"job{i}=$(sbatch --parsable {_request(nodes, gpus)} --array={','.join(map(str, numbers))} "
        f"--output={shlex.quote(str(out))}/run-%a.out {SUBMIT} {given})"
        for i, ((nodes, gpus), numbers) in enumerate(arrays.items())
    ]
    after = f"--dependency=afterany:{':'.join(f'$job{i}' for i in range(len(arrays)))} " if arrays else ""
    report = f"sbatch --parsable {_request(1, 1)} {after}--output={shlex.quote(str(out))}/report.out"
    return [*lines, f"{report} {SUBMIT} {given} --report_only"]


def _request(nodes: int, gpus: int) -> str:
    return f"-N {nodes} --ntasks-per-node={gpus} --gpus-per-node={gpus}"
