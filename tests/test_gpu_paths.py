"""What a GPU user meets, shown without a GPU."""

import datetime
import socket
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distributed import attention
from tests.support import programs
from training import profiling
from training.model import build_model
from training.profiling import build_profiler
from training.speed_options import apply_speed_options
from utils import comm, device
from utils.errors import UsageError
from utils.launch import interface_towards


def start_ranks(names):
    """check_devices on a rank for each name; returns what each raised."""
    store, raised = dist.HashStore(), [None] * len(names)

    def check(rank):
        try:
            comm.check_devices(store, len(names), names[rank])
        except UsageError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return raised


def test_ranks_that_share_a_gpu_are_told_so_all_of_them():
    line = "3 ranks have 2 GPUs, and each needs one of its own: start fewer ranks, or give --device cpu"
    assert start_ranks(["node1 a", "node1 b", "node1 a"]) == [line] * 3
    assert start_ranks(["node1 a", "node2 a", "node1 b"]) == [None] * 3
    assert start_ranks(["", ""]) == [None] * 2  # a CPU may be shared


@pytest.mark.parametrize(
    ("variables", "driver", "line"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, None, r"Slurm gave this job GPUs \(4 on this node\), but torch .* sees none"),
        (
            {},
            "/proc/self/status",
            "this machine has a driver of NVIDIA, but torch .* sees none.*--device cpu trains on",
        ),
    ],
)
def test_a_gpu_job_does_not_train_on_the_cpu_in_silence(monkeypatch, variables, driver, line):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")  # tests/conftest.py
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if driver:
        monkeypatch.setattr(device, "DRIVERS", {driver: "NVIDIA"})
    with pytest.raises(UsageError, match=line):
        device.select_device("auto")
    assert device.select_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    assert device.select_device("auto") == torch.device("cpu")


def groups_timeouts(config):
    comm.build_mesh(torch.device("cpu"), config.layout(comm.world_size()))
    meshes = [mesh for mesh in comm._meshes.values() if mesh.ndim == 1]
    return {mesh.get_group()._get_backend(torch.device("cpu")).options._timeout for mesh in meshes}


def test_every_group_of_a_mesh_waits_as_long_as_comm_timeout_says(ranks, tiny_config, monkeypatch):
    config = tiny_config(tensor_parallel=2)
    assert ranks(4, groups_timeouts, config)[0] == {comm._patience}


def test_on_several_nodes_gloo_uses_the_interface_towards_rank_0():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") == ""
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    assert not others or interface_towards("203.0.113.1") in [*others, ""]


def test_offloaded_tensors_are_reduced_by_gloo_beside_nccl(monkeypatch):
    """The backends that are asked for; no GPU is there to use them."""
    asked = {}
    monkeypatch.setenv("RANK", "0")
    for name, value in {"LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(comm, "select_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(comm, "physical_name", lambda _: "")
    monkeypatch.setattr(comm, "check_devices", lambda *_: None)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **others: asked.update(others, backend=backend))
    monkeypatch.setattr(comm, "FailureListener", lambda *_: None)
    monkeypatch.setattr(comm, "_listener", None)
    monkeypatch.setattr(comm, "_patience", comm._patience)
    monkeypatch.setattr(dist.PrefixStore, "clone", lambda self: self, raising=False)
    comm.init("cuda", 60, cpu_offload=True)
    assert asked["backend"] == "cpu:gloo,cuda:nccl" and asked["timeout"] == datetime.timedelta(seconds=60)
    comm.init("cuda", 60)
    assert asked["backend"] == "nccl" and asked["device_id"] == torch.device("cuda", 0)


def test_dali_and_cuda_graphs_exclude_each_other(tiny_config):
    config = tiny_config(enable_cuda_graphs=True, data_loader_config="dali")
    with pytest.raises(UsageError, match="DALI's threads use the device while the step"):
        apply_speed_options(config, torch.device("cuda"), build_model(config))


@pytest.mark.parametrize("main", [True, False])
def test_nsight_systems_records_every_rank_and_torch_profiler_the_first(tiny_config, monkeypatch, tmp_path, main):
    monkeypatch.setattr(comm, "is_main", lambda: main)
    assert (build_profiler(tiny_config(profile="torch"), torch.device("cpu"), tmp_path) is not None) == main
    monkeypatch.setenv(profiling.UNDER_NSYS, "1")
    assert build_profiler(tiny_config(), torch.device("cuda"), tmp_path) is not None


@pytest.mark.parametrize(
    ("capability", "hip", "found"),
    [((9, 0), None, attention.CudaFlash), ((7, 5), None, attention.Plain), ((7, 5), "7.1", attention.CudaFlash)],
)
def test_ring_attention_takes_the_flash_kernel_where_a_gpu_has_it(monkeypatch, capability, hip, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 2, 64, 32))
    assert attention.kernel(q, None) is found


@pytest.mark.parametrize(("hip", "length"), [(None, 64), ("7.1", 50)])
def test_the_log_sum_exp_is_padded_for_nvidia_alone(monkeypatch, hip, length):
    taken = []
    monkeypatch.setattr(torch.version, "hip", hip)
    backward = lambda grad, q, k, v, mask, out, lse, *others: taken.append(lse.shape[2]) or (q, k, v)  # noqa: E731
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention_backward", backward, raising=False)
    x = torch.zeros(1, 2, 50, 8)
    attention.CudaEfficient.backward(x, x, x, x, x, torch.zeros(1, 2, 50))
    assert taken == [length]


def test_the_line_of_a_gpu_job_without_gpus_ends_the_run_at_once(tiny_options):
    words = ["train.py", *tiny_options(device="auto")]
    done = programs.run(words, env=programs.os.environ | {"SLURM_GPUS_ON_NODE": "2"})
    assert done.returncode == 2 and done.stderr.startswith("error: Slurm gave this job GPUs"), done.stderr
