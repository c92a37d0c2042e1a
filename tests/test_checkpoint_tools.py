"""`python -m tools.checkpoint` shows and exports whole checkpoints, and refuses anything else in one line."""

import json

import pytest
import torch
from safetensors import safe_open

from tests.support import programs
from tests.support.refusals import refusal
from tests.test_checkpoint import DAMAGES, model_and_optimizer, save
from tools.checkpoint import main
from training.checkpoints.folder import CheckpointFolder
from utils.errors import os_errors_as_usage_errors


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2, config={"config": "short", "embed_dim": 384})


def test_show_lists_a_checkpoint_and_says_that_it_is_whole(folder, capsys):
    save(folder, 1)
    path = save(folder, 2, val_loss=0.25)
    for where in (path, folder.path, folder.path.parent):  # checkpoint, folder of checkpoints, run
        main(["show", str(where)])
        text = capsys.readouterr().out
        for line in (
            f"checkpoint   {path}", "iteration    2", "val_loss     0.25", "config       short", "world size   1",
            "hashes       verified, 1 files", "model        4 tensors, 26 values, 104 bytes",
            "optimizer    12 tensors, 56 values, 224 bytes",
        ):  # fmt: skip
            assert line in text.splitlines(), text
    (row,) = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| model.0.weight ")]
    assert [cell.strip() for cell in row] == ["model.0.weight", "[4, 3]", "float32", "1", "48"]


def test_export_writes_the_weights_with_the_config(folder, tmp_path):
    save(folder, 7)
    main(["export", str(folder.path), str(tmp_path / "model.safetensors")])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        expected = model_and_optimizer(0)[0].state_dict()
        assert set(file.keys()) == set(expected)
        assert all(torch.equal(file.get_tensor(name), value) for name, value in expected.items())
        assert json.loads(file.metadata()["config"]) == folder.config and file.metadata()["iteration"] == "7"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_neither_shown_nor_exported(folder, damage, tmp_path):
    path = save(folder, 1)
    damage(path)
    for where, message in ((path, "checkpoint .*iter-00000001: "), (folder.path, "no whole checkpoint in it")):
        for words in (["show", str(where)], ["export", str(where), str(tmp_path / "out.safetensors")]):
            with refusal(message):
                main(words)
    assert not (tmp_path / "out.safetensors").exists()


def test_what_cannot_be_shown_or_exported_is_refused_in_one_line(folder, tmp_path):
    save(folder, 1)
    (tmp_path / "file").write_text("")
    checkpoint, file = str(folder.path), str(tmp_path / "file")
    for words, message in (
        (["show", str(tmp_path / "none")], "none: no such folder"),
        (["show", file], "file: no such folder"),
        (["show", str(tmp_path / "checkpoints" / "iter-00000009")], "no such folder"),
        (["export", checkpoint, file], "file: exists already"),
        (["export", checkpoint, f"{file}/out"], "file: File exists"),
        (["export", checkpoint], "required: OUT"),
        ([], "required: COMMAND"),
    ):
        with refusal(message), os_errors_as_usage_errors():
            main(words)


def test_the_command_ends_with_status_2_and_one_line(tmp_path):
    done = programs.run(["-m", "tools.checkpoint", "show", tmp_path / "none"])
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {tmp_path}/none: no such folder\n")
