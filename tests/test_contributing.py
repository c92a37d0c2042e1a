"""CONTRIBUTING.md names the places where things are added; files that other programs read say what the tree says."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from utils.yaml_files import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / ".github/CONTRIBUTING.md").read_text()
TABLE = dict(re.findall(r"^\| (.+?) \| (`.+`.*?) \|$", PAGE, re.M))
MODEL = """from torch import Tensor, nn


class Toy(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, width: int = 4):
        super().__init__()
        self.first = nn.Conv2d(in_channels, width, 3, padding=1)
        self.last = nn.Conv2d(width, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())
"""
LOSS = '''

def toy(prediction: Tensor, target: Tensor, image_group: dist.ProcessGroup | None = None) -> Tensor:
    """Mean of the absolute error."""
    return (prediction - target).abs().flatten(1).mean(1)
'''
TASK = """from torch import Tensor

from training.tasks import forecast


class ToyTask(forecast.ForecastTask):
    def loss(self, prediction: Tensor, target: Tensor, image_group) -> Tensor:
        return 2 * super().loss(prediction, target, image_group)
"""


def files(row):
    """The files that the page names for a kind of addition."""
    return re.findall(r"`([\w./]+)`", TABLE[row])


def test_every_file_that_the_page_names_is_there():
    assert len(TABLE) >= 9
    for row in TABLE:
        for file in files(row):
            assert (ROOT / file).parent.is_dir(), (row, file)
            assert "NAME" in file or (ROOT / file).is_file(), (row, file)
    for file in re.findall(r"`((?:[\w.]+/)+[\w.]+\.\w+)`", PAGE):
        assert (ROOT / file.replace("NAME", "generic")).exists() or "NAME" in file, file


def test_a_model_a_task_a_loss_and_an_optimizer_need_exactly_the_files_that_the_page_names(tmp_path, data_keys):
    tree, written = tmp_path / "tree", []
    for name in ("networks", "weather", "utils", "distributed", "training", "config"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tree)

    def write(file, text):
        (tree / file).write_text(text)
        written.append(re.sub("toy", "NAME", file))

    write("networks/toy.py", MODEL)
    registry = (tree / "networks/__init__.py").read_text()
    write("networks/__init__.py", registry.replace("MODELS = {", 'MODELS = {\n    "toy": "networks.toy:Toy",'))
    assert sorted(written) == sorted(files("a model"))
    write("training/tasks/toy.py", TASK)
    assert written[-1:] == files("a task")
    written.clear()
    table = (tree / "utils/choices.py").read_text()
    table = table.replace("OPTIMIZERS = {", 'OPTIMIZERS = {\n    "Toy": OptimizerKind("torch.optim:RAdam", takes=()),')
    write("utils/choices.py", table)
    assert written == files("an optimizer")
    write(
        "utils/choices.py",
        table.replace("LOSSES = {", 'LOSSES = {\n    "toy": LossKind("training.forecasting.losses:toy"),'),
    )
    write("training/forecasting/losses.py", (tree / "training/forecasting/losses.py").read_text() + LOSS)
    assert written[1:] == files("a loss")

    words = [
        "--config=quick",
        "--model=toy",
        "--task=toy",
        "--optimizer=toy",
        "--loss=toy",
        "--model_args={width: 3}",
        "--img_size",
        "16",
        "32",
    ]
    words += ["--num_iters=3", "--global_batch_size=4", "--device=cpu"]
    words += [f"--{key}={value}" for key, value in data_keys.items()]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", *words], cwd=tree, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "finished 3 iterations" in done.stdout


def test_workflows_run_what_the_tree_has():
    flows = {path.name: yaml().load(path) for path in (ROOT / ".github/workflows").iterdir()}
    runs = {name: [step["run"] for job in flow["jobs"].values() for step in job["steps"] if "run" in step]
            for name, flow in flows.items()}  # fmt: skip
    assert runs["ci.yml"] == [".ci/run", 'make test TORCH="torch==${{ matrix.torch }}"'] and os.access(
        ROOT / ".ci/run", os.X_OK
    )
    assert all(flow["permissions"] == {"contents": "read"} for flow in flows.values())
    assert runs["nightly.yml"] == ["make ${{ matrix.command }}"]
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    commands = flows["nightly.yml"]["jobs"]["chance"]["strategy"]["matrix"]["command"]
    assert commands and all(command.split()[0] in targets for command in commands)


def test_the_lock_has_the_version_of_everything_that_is_asked_for():
    lines = (ROOT / "requirements/lock.txt").read_text().splitlines()
    locked = {}
    for line in lines:
        if not line.startswith("#"):
            name, version = line.split("==")
            locked[canonical(name)] = version
    # torch has a release of its own in requirements.txt; public models are not among what each test run installs.
    installed = re.findall(r"-r (requirements/\w+\.txt)", (ROOT / "Makefile").read_text())
    files = {"requirements.txt", *installed} - {"requirements/models.txt"}
    assert len(files) > 6
    for file in files:
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.M):
            if name != "torch":
                assert locked[canonical(name)] == version, f"{file}: {name}; `make lock` renews the lock"
    ci = yaml().load(ROOT / ".github/workflows/ci.yml")
    assert ci["jobs"]["all-tests"]["env"]["PIP_CONSTRAINT"].endswith("/requirements/lock.txt")


def canonical(name):
    """The name of a package as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_hooks_run_the_programs_of_make_lint_in_their_version():
    (repo,) = yaml().load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local" and all(hook["language"] == "system" for hook in repo["hooks"])  # of .venv as it is
    lint = re.search(r"^lint:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    programs = [line.split()[0].replace("$(BIN)", ".venv/bin") for line in lint.splitlines()]
    assert sorted(hook["entry"].split()[0] for hook in repo["hooks"]) == sorted(programs)


def test_the_citation_is_complete_and_names_this_version():
    citation = yaml().load(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert all(citation[key] for key in ("cff-version", "message", "title", "authors"))
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert f"# {citation['title']}\n" in (ROOT / "README.md").read_text()
