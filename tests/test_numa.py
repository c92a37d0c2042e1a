"""A process stays on the CPUs next to its GPU, as far as it may use them."""

import os
from types import SimpleNamespace

import pytest
import torch

from utils import device as device_module

GPU = torch.device("cuda", 0)
NODE = set(range(128))


@pytest.fixture
def bound(tmp_path, monkeypatch):
    """Call with the CPUs that a process has, and the list of those next to its GPU: those that it has afterwards."""
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(device_module, "PCI", tmp_path)

    def run(allowed, near, device=GPU):
        if near is not None:
            (tmp_path / "0000:c1:00.0").mkdir()
            (tmp_path / "0000:c1:00.0/local_cpulist").write_text(near)
        state = {"cpus": set(allowed)}
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: state["cpus"])
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: state.update(cpus=cpus))
        device_module.stay_near(device)
        return state["cpus"]

    return run


@pytest.mark.parametrize(
    ("allowed", "near", "chosen"),
    [
        (NODE, "32-47,96-111\n", {*range(32, 48), *range(96, 112)}),  # of torchrun, which binds nobody
        (range(32, 64), "32-47", set(range(32, 48))),  # of Slurm, half of them far
        (range(40, 72), "32-47", set(range(40, 72))),  # most of them far: it keeps what it was given
        (range(16), "32-47", set(range(16))),  # all of them far: it may have no others
        (range(16), "0-127", set(range(16))),
        (range(16), "", set(range(16))),
        (range(16), "a container's", set(range(16))),
        (range(16), None, set(range(16))),
    ],
)
def test_a_process_stays_on_the_cpus_next_to_its_gpu(bound, allowed, near, chosen):
    assert bound(allowed, near) == chosen


def test_without_a_gpu_nothing_is_bound(bound):
    assert bound(NODE, "0-3", torch.device("cpu")) == NODE
