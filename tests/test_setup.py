"""`make setup` with another torch, `pip install`, and the recipes of images: what is installed, and from what."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
NEEDED = ["Makefile", "requirements.txt", "tools/torch_version.py"]
DOCKER, APPTAINER = (ROOT / "sites" / name for name in ("Dockerfile", "apptainer.def"))


@pytest.fixture
def make(tmp_path):
    """Call with the words of a make command, and variables; it runs in a folder that holds NEEDED alone."""
    (tmp_path / "tools").mkdir()
    for name in NEEDED:
        shutil.copy(ROOT / name, tmp_path / name)

    def run(*words, **environment):
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_NO_INDEX": "1"} | environment
        command = ["make", f"PYTHON={sys.executable}", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)

    return run


def installed(make, *words):
    """The words of each call of pip, in order."""
    lines = make("-n", "setup", *words).stdout.splitlines()
    return [
        re.split(r"pip install (?:--quiet|--disable-pip-version-check| )*", line)[-1] for line in lines if "pip" in line
    ]


def test_torch_comes_first_and_nothing_else_chooses_it(make):
    others = "-r /dev/stdin"
    assert installed(make) == ["$(grep '^torch==' requirements.txt)", others]
    build = "torch==2.11.0 --index-url https://example.org/whl"
    assert installed(make, f"TORCH={build}") == [build, others]
    assert installed(make, "SITE_TORCH=1") == [others]
    assert "grep -v '^torch==' requirements.txt |" in make("-n", "setup").stdout


def test_another_torch_gets_an_environment_of_its_own(make, tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/installed").touch()
    assert "Nothing to be done" in make("-n", "setup").stdout
    assert "-m venv --clear  .venv" in make("-n", "setup", "TORCH=torch==2.11.0").stdout
    assert "-m venv --clear --system-site-packages .venv" in make("-n", "setup", "SITE_TORCH=1").stdout


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('__version__ = "2.9.1+rocm6.4"', "error: torch 2.9.1+rocm6.4 is too old: the tests know 2.11 and newer"),
        (
            'raise ImportError("libamdhip64.so.7")',
            "error: no torch (libamdhip64.so.7): load the module that has it, or ",
        ),
    ],
)
def test_a_torch_that_will_not_do_is_one_line_and_the_environment_stays(make, tmp_path, text, line):
    (tmp_path / "module/torch").mkdir(parents=True)
    (tmp_path / "module/torch/__init__.py").write_text(text)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/mine").touch()
    done = make("setup", "SITE_TORCH=1", PYTHONPATH=str(tmp_path / "module"))
    assert done.returncode == 2 and done.stderr.startswith(line), done.stderr
    assert done.stderr.count("\n") == 2 and "make: ***" in done.stderr and (tmp_path / ".venv/mine").is_file()


@pytest.mark.slow("an environment is made on top of another's torch, without an index")
def test_the_torch_of_a_module_is_used(make, tmp_path):
    done = make("setup", "SITE_TORCH=1", PYTHONPATH=sysconfig.get_path("purelib"))
    assert done.returncode == 0 and f"torch {metadata.version('torch')}" in done.stdout, done.stderr
    packages = {path.name for path in (tmp_path / ".venv").glob("lib/python*/site-packages/*")}
    assert "torch" not in packages and "pip" in packages


def test_each_file_of_requirements_is_what_pip_installs():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = {path.stem: {"file": [f"requirements/{path.name}"]} for path in ROOT.glob("requirements/*.txt")}
    extras.pop("lock")  # versions alone, of what these ask for
    assert settings["project"]["dynamic"] == ["optional-dependencies"]
    dynamic = settings["tool"]["setuptools"]["dynamic"]
    assert len(extras) > 5 and dynamic["optional-dependencies"] == extras


def test_pip_keeps_a_torch_that_the_tests_know():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "requirements.txt").read_text(), re.M)
    assert needed == ["torch>=2.11,<2.16", *pinned[1:]]
    matrix = re.search(r"torch: \[(.+)\]", (ROOT / ".github/workflows/ci.yml").read_text())[1]
    assert matrix == "2.11.0, 2.13.0, 2.15.0"


@pytest.mark.skipif(int(metadata.version("setuptools").split(".")[0]) < 77, reason="this setuptools is too old")
@pytest.mark.slow("pip builds and installs the tree, and the commands that it makes run in another folder")
@pytest.mark.parametrize("how", [[], ["--editable"]], ids=["copied", "editable"])
def test_pip_installs_commands_that_run_anywhere(tmp_path, how):
    tree, bin, elsewhere = tmp_path / "tree", tmp_path / "venv/bin", tmp_path / "elsewhere"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "data", "logs", "tests", "docs", "build", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=left_out)
    elsewhere.mkdir()
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_INDEX": "1"}

    def run(program, *words):
        return subprocess.run([bin / program, *words], cwd=elsewhere, env=env, capture_output=True, text=True)

    subprocess.run([sys.executable, "-m", "venv", bin.parent], check=True)
    done = run("python", "-m", "pip", "install", "--no-deps", "--no-build-isolation", *how, tree)
    assert done.returncode == 0, done.stderr
    code = "from importlib.metadata import requires; print(*requires('deep-learning-at-scale'), sep='\\n')"
    extras = [file for file in ROOT.glob("requirements/*.txt") if file.stem != "lock"]
    files = [file.read_text().splitlines() for file in extras]
    lines = {line for file in files for line in file if not line.startswith("#")}
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines |= {str(Requirement(line)) for line in needed}
    assert {line.partition(";")[0].strip() for line in run("python", "-c", code).stdout.splitlines()} == lines

    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {"train", "train_mp", "train_shard", "forecast", "plan"} == set(commands)
    for name in commands.keys() - {"plan", "train"} if how else ():
        done = run(name, "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}.py "), done.stderr
    done = run("plan", "--yaml_config=config/mp.yaml", "--config=mp_quick", "--gpus=2", "--tensor_parallel=2")
    assert done.returncode == 0 and done.stdout.startswith("mp_quick on 2 x "), done.stderr
    done = run("train", "--config=quick", "--device=cpu")
    assert done.returncode == 2 and "data/quick" in done.stderr and not list(elsewhere.iterdir()), done.stderr


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None and "CI" not in os.environ:
        pytest.skip("hadolint is not installed: pip install -r requirements/dev.txt")
    done = subprocess.run([hadolint, DOCKER], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_both_images_hold_the_environment_that_make_setup_makes():
    docker, apptainer = DOCKER.read_text(), APPTAINER.read_text()
    assert re.search(r"^FROM (.+)", docker, re.M)[1] == re.search(r"^From: (.+)", apptainer, re.M)[1]
    packages = [re.search(r"--no-install-recommends (.+?)(?: \\)?$", text, re.M)[1] for text in (docker, apptainer)]
    assert packages[0] == packages[1] and "make" in packages[0]
    assert 'make setup TORCH="$TORCH"' in docker and 'make setup TORCH="{{ TORCH }}"' in apptainer
    assert not re.search(r"\bpip3? |sudo|curl|wget", docker + apptainer)  # nothing beside it
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", docker, re.M) for name in line.split()}
    section = re.search(r"^%files\n(.+?)\n\n", apptainer, re.M | re.S)[1]
    assert copied == {line.split()[0] for line in section.splitlines()} == set(NEEDED)
    assert all("/opt/vit-era5/.venv/bin:$PATH" in text for text in (docker, apptainer))
