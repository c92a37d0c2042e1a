"""Waiting threads spin only a little, unless their user has said how they wait."""

import os
import subprocess
import sys

import pytest

from utils.openmp import CHOICES, limit_spinning

# What a program imports first is a module of any package; torch reads the environment as it is loaded.
PROBE = """
import importlib.abc, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()

sys.meta_path.insert(0, Watch())
import {module}
"""


@pytest.mark.parametrize(
    "module", ["train", "train_mp", "train_shard", "plan", "benchmark", "forecast", "tools.preflight.checks"]
)
def test_every_program_sets_it_before_torch_is_loaded(module):
    own = {name: value for name, value in os.environ.items() if name not in CHOICES}
    probe = [sys.executable, "-c", PROBE.format(module=module)]
    printed = subprocess.run(probe, env=own, capture_output=True, text=True, check=True).stdout
    assert int(printed) > 0


@pytest.mark.parametrize("name", CHOICES)
def test_a_users_own_choice_stays(name):
    environment = {name: "7"}
    limit_spinning(environment)
    assert environment == {name: "7"}
