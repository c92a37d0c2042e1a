"""docs/porting.md as a reader follows it: its files are written, its diff is applied, its commands are run."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/porting.md").read_text()
PAGE = PAGE[PAGE.index("## Your model") : PAGE.index("## Your cluster")]
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.S))
DIFF = re.search(r"```diff\n(.*?)```", PAGE, re.S)[1]
COMMANDS = re.findall(r"^    ((?:python|torchrun) .*)$", PAGE, re.M)
SMALL = "--num_iters=3 --warmup=0 --limit_nsamples=16 --limit_nsamples_val=2 --device=cpu --global_batch_size=4"
# torchvision's own operators are built for CUDA; timm imports the package and calls none of them.
TORCHVISION = """
import builtins, torch
builtins.torchvision_operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    builtins.torchvision_operators.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def patched(text, diff):
    """The text after a diff whose hunks have no line numbers."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def run(command, folder, expdir, data_keys):
    """The command of the page, with little to do."""
    words = shlex.split(f"{command} {SMALL} --expdir={expdir}")
    if "classify" not in command:
        words += ["--img_size", "16", "32", *(f"--{name}={value}" for name, value in data_keys.items())]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    words[0] = str(Path(sys.executable).with_name(words[0]))
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stderr


def test_the_page_has_what_is_run_here():
    assert set(FILES) == {"my_unet.py", "my_backbone.py"}
    assert len(COMMANDS) == 13 and sum(command.startswith("torchrun") for command in COMMANDS) == 7


@pytest.mark.slow("every command of the page, with its own launcher")
def test_the_unet_trains_as_it_is_and_after_the_diff_on_every_rung(tmp_path, data_keys, monkeypatch):
    programs.use_forks(tmp_path / "bin", monkeypatch)
    (tmp_path / "my_unet.py").write_text(FILES["my_unet.py"])
    commands = [command for command in COMMANDS if "my_unet" in command]
    assert "n_channels: 20" in commands[0] and len(commands) == 4
    run(commands[0], tmp_path, tmp_path / "0", data_keys)
    (tmp_path / "my_unet.py").write_text(patched(FILES["my_unet.py"], DIFF))
    losses = []
    for number, command in enumerate(commands[1:], 1):
        said = run(re.sub(r' --model_args ".*?"', "", command), tmp_path, tmp_path / str(number), data_keys)
        assert "is built on the CPU" not in said
        (summary,) = (tmp_path / str(number)).glob("*/00/summary.json")
        losses.append(json.loads(summary.read_text())["val_loss"])
    whole, shared, split = losses
    assert shared == pytest.approx(whole, rel=1e-4) and split == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow("every command of the page, with its own launcher")
@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_models_of_timm_train_on_one_device_and_split(tmp_path, data_keys, monkeypatch):
    programs.use_forks(tmp_path / "bin", monkeypatch)
    (tmp_path / "my_backbone.py").write_text(FILES["my_backbone.py"])
    (tmp_path / "sitecustomize.py").write_text(TORCHVISION)
    commands = [command for command in COMMANDS if "my_backbone" in command or "timm" in command]
    assert len(commands) == 3
    for number, command in enumerate(commands):
        run(command, tmp_path, tmp_path / str(number), data_keys)


@pytest.mark.slow("every command of the page, with its own launcher")
def test_the_sfno_trains_on_split_images_as_on_one_device(tmp_path, data_keys, monkeypatch):
    pytest.importorskip("torch_harmonics", reason="not installed, or for another torch", exc_type=ImportError)
    programs.use_forks(tmp_path / "bin", monkeypatch)
    losses = []
    for number, command in enumerate(command for command in COMMANDS if "torch_harmonics" in command):
        run(command, tmp_path, tmp_path / str(number), data_keys)
        (summary,) = (tmp_path / str(number)).glob("*/00/summary.json")
        losses.append(json.loads(summary.read_text())["val_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses) == 2


@pytest.mark.slow("every command of the page, with its own launcher")
@pytest.mark.skipif(importlib.util.find_spec("aurora") is None, reason="microsoft-aurora is not installed")
def test_aurora_is_fine_tuned_over_four_ranks_and_forecasts(tmp_path, data_keys, monkeypatch):
    programs.use_forks(tmp_path / "bin", monkeypatch)
    (tmp_path / "sitecustomize.py").write_text(TORCHVISION)
    _, tune, predict = (command for command in COMMANDS if "aurora" in command)  # its plan is in tests/test_aurora.py
    assert "Initial weights" not in run(tune, tmp_path, tmp_path, data_keys)
    predict = predict.replace("logs/aurora_quick/00", str(tmp_path / "aurora_quick/00")).split(" --lead")[0]
    words = [*shlex.split(predict), "--lead_hours=12", "--starts=2", "--skill_only", "--device=cpu"]
    words[0] = sys.executable
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "2 forecasts of 12 hours" in done.stdout, done.stderr
