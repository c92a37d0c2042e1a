"""Paths of a GPU user, shown without a GPU."""

import datetime
import socket
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.distributed_c10d import _resolve_process_group

from distributed import attention_kernels
from distributed.shard.core.spec import as_mesh
from tests.support.refusals import refusal
from training.checkpoints import folder as checkpoint
from training.checkpoints import state as checkpoint_state
from training.run import profiling
from training.run.profiling import build_profiler
from training.step import random_streams
from training.tasks import build_task
from utils import comm, connection, device, launch
from utils.data_loader import BatchLoader, Slot
from utils.errors import UsageError
from utils.launch import Launch, interface_towards

CPU = torch.device("cpu")


def start_ranks(names):
    """check_devices on a rank for each name; returns what each raised."""
    store, raised = dist.HashStore(), [None] * len(names)

    def check(rank):
        try:
            connection.check_devices(store, Launch(rank, rank, len(names)), names[rank])
        except UsageError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return raised


def test_ranks_that_share_a_gpu_are_told_so_all_of_them():
    line = (
        "3 ranks have 2 GPUs (by PCI address and UUID), and each needs one of its own: start fewer ranks, or give "
        "--device cpu"
    )
    assert start_ranks(["node1 a", "node1 b", "node1 a"]) == [line] * 3
    assert start_ranks(["node1 a", "node2 a", "node1 b"]) == [None] * 3
    assert start_ranks(["", ""]) == [None] * 2  # a CPU may be shared


def test_gpus_differ_by_their_address_or_their_uuid(monkeypatch):
    names, none = set(), "00000000-0000-0000-0000-000000000000"
    for bus, uuid in ((1, none), (2, none), (3, "part a"), (3, "part b"), (3, "part b")):
        properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        names.add(device.physical_name(torch.device("cuda", 0)))
    assert len(names) == 4 and device.physical_name(CPU) == ""


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
    with refusal(line):
        device.select_device("auto")
    assert device.select_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    assert device.select_device("auto") == torch.device("cpu")


def groups_timeouts(config, patience):
    with mock.patch.object(comm, "_patience", patience):
        comm.build_mesh(CPU, config.layout(comm.world_size()))
        groups = [mesh.get_group() for mesh in comm._meshes.values() if mesh.ndim == 1]
        if config.domain_parallel != 1:
            groups.append(_resolve_process_group(as_mesh(comm.get_mesh("domain_lat", "domain_lon")).joint.name))
    return {group._get_backend(CPU).options._timeout for group in groups}


@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"domain_parallel": 2}], ids=str)
def test_every_group_of_a_mesh_waits_as_long_as_comm_timeout_says(ranks, tiny_config, layout):
    patience = datetime.timedelta(seconds=77)
    assert ranks(4, groups_timeouts, tiny_config(**layout), patience)[0] == {patience}


def test_on_several_nodes_gloo_uses_the_interface_towards_rank_0():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") == ""
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    assert not others or interface_towards("203.0.113.1") in [*others, ""]


@pytest.mark.parametrize(
    ("addresses", "route", "found"),
    [
        ({"eth0": "10.0.0.3"}, "", "eth0"),
        ({"eth0": "10.0.0.3", "ib0": "10.1.0.3"}, "ib0", "ib0"),
        ({"eth0": "10.0.0.3", "ib0": "10.1.0.3"}, "", "one of eth0 ib0$"),
        ({}, "", "lo"),  # nodes that are simulated on one machine
    ],
)
def test_several_nodes_do_not_use_the_loopback_of_rank_0(monkeypatch, addresses, route, found):
    """Debian's /etc/hosts says that a host's own name is 127.0.1.1."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(launch, "interface_addresses", lambda: {"lo": "127.0.0.1"} | addresses)
    monkeypatch.setattr(launch, "interface_towards", {"node1": "lo", launch.ELSEWHERE: route}.get)
    nodes = launch.Launch(0, 0, 4, 2, "node1", 29500)
    if "$" in found:
        with refusal(f"^node1 is a loopback address on this node.*GLOO_SOCKET_IFNAME.*{found}"):
            launch.name_gloo_interface(nodes)
        return
    launch.name_gloo_interface(nodes)
    assert launch.os.environ.pop("GLOO_SOCKET_IFNAME") == found


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_ranks_ask_for_the_backend_of_their_devices_and_gloo_for_what_is_offloaded(monkeypatch, kind, backend):
    """The backends that are asked for; no GPU is there to use them."""
    device = torch.device(kind, 0)
    there = {"read_launch": Launch(0, 0, 2), "select_device": device, "backend_for": backend}
    for name in ("physical_name", "check_devices", "open_store", "FailureListener", "_listener"):
        monkeypatch.setattr(connection, name, mock.Mock())
    monkeypatch.setattr(comm, "_patience", None)
    for name, value in there.items():
        monkeypatch.setattr(connection, name, mock.Mock(return_value=value))
    monkeypatch.setattr(dist, "init_process_group", asked := mock.Mock())
    connection.connect(kind, 60, cpu_offload=True)
    connection.connect(kind, 60)
    offloaded, plain = asked.call_args_list
    assert offloaded.args == (f"cpu:gloo,{kind}:{backend}",) and offloaded.kwargs["device_id"] is None
    assert plain.args == (backend,) and plain.kwargs["device_id"] == device
    assert plain.kwargs["timeout"] == datetime.timedelta(seconds=60)


@pytest.mark.parametrize(("kind", "missing"), [("xpu", "xccl"), ("mps", "gloo"), ("meta", "library")])
def test_devices_whose_ranks_cannot_communicate_are_refused(kind, missing):
    with refusal(f"has no {missing} through which ranks on {kind} communicate: another build"):
        device.backend_for(torch.device(kind))
    assert device.backend_for(torch.device("cpu")) == "gloo"


def test_the_peak_is_that_of_the_device_where_torch_counts_it(monkeypatch):
    assert (
        device.device_module(torch.device("cpu"))
        is device.device_module(torch.device("mps"), "max_memory_allocated")
        is None
    )
    monkeypatch.setattr(torch.xpu, "max_memory_allocated", lambda device: 7)
    assert device.peak_memory_bytes(torch.device("xpu", 0)) == 7
    assert device.peak_memory_bytes(torch.device("mps")) == pytest.approx(device.peak_memory_bytes(CPU), rel=0.01)


def test_random_numbers_of_any_accelerator_are_kept(monkeypatch):
    kept = []
    monkeypatch.setattr(random_streams, "accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda: torch.tensor([7]))
    monkeypatch.setattr(torch.xpu, "set_rng_state", kept.append)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = checkpoint_state.collect_state(model, optimizer)
    assert state["random"].keys() == {"cpu0", "xpu0", "python0", "numpy0"}
    checkpoint_state.restore_state(state, model, optimizer)
    assert kept == [torch.tensor([7])]


class Told:
    """A stand-in that writes down what is called on it, and on whatever comes back; a context too."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __getattr__(self, called):
        return lambda *args, **_: self.log.append(f"{self.name}.{called}") or Told(self.log, self.name)

    def __enter__(self):
        self.log.append(f"in {self.name}")

    def __exit__(self, *_):
        self.log.append(f"out of {self.name}")


def test_a_batch_is_copied_in_a_stream_of_its_own_and_computation_waits_for_it(tiny_config, monkeypatch):
    log = []
    side, main = Told(log, "side"), Told(log, "main")
    gpu = SimpleNamespace(Stream=lambda device: side, stream=lambda s: s, current_stream=lambda device: main)
    loader = build_task(tiny_config()).build_loaders(CPU)[0]
    loader.gpu, loader.side_stream, loader.device = gpu, side, torch.device("xpu")
    monkeypatch.setattr(loader, "_split", lambda frames: frames)
    monkeypatch.setattr(torch, "addcmul", lambda bias, frames, scale: log.append("normalise") or frames)
    slot = SimpleNamespace(tensor=Told(log, "frames"), copied=None)
    loader.to_device(slot)
    assert log == [
        "in side", "frames.to", "side.record_event", "normalise", "out of side", "main.wait_stream",
        "frames.record_stream",
    ]  # fmt: skip
    assert slot.copied is not None  # the buffer is not filled again before the copy is done


def test_dali_leaves_rocm_to_the_host(monkeypatch):
    # torch's own libraries make a package `nvidia` too.
    pytest.importorskip("nvidia.dali", reason="pip install -r requirements/dali.txt")
    from utils.data_loader_dali import gpu_of

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu_of(torch.device("cuda", 1)) == 1 and gpu_of(CPU) is gpu_of(torch.device("xpu", 1)) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_of(torch.device("cuda", 1)) is None


@pytest.mark.parametrize("main", [True, False])
def test_nsight_systems_records_every_rank_and_torch_profiler_the_first(tiny_config, monkeypatch, tmp_path, main):
    monkeypatch.setattr(comm, "is_main", lambda: main)
    assert (build_profiler(tiny_config(profile="torch"), torch.device("cpu"), tmp_path) is not None) == main
    monkeypatch.setenv(profiling.UNDER_NSYS, "1")
    assert build_profiler(tiny_config(), torch.device("cuda"), tmp_path) is not None


@pytest.mark.parametrize(
    ("capability", "hip", "found"),
    [
        ((9, 0), None, attention_kernels.CudaFlash),
        ((7, 5), None, attention_kernels.Plain),
        ((7, 5), "7.1", attention_kernels.CudaFlash),
    ],
)
def test_ring_attention_takes_the_flash_kernel_where_a_gpu_has_it(monkeypatch, capability, hip, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 2, 64, 32))
    assert attention_kernels.kernel(q, None) is found


@pytest.mark.parametrize(("hip", "length"), [(None, 64), ("7.1", 50)])
def test_the_log_sum_exp_is_padded_for_nvidia_alone(monkeypatch, hip, length):
    taken = []
    monkeypatch.setattr(torch.version, "hip", hip)
    backward = lambda grad, q, k, v, mask, out, lse, *others: taken.append(lse.shape[2]) or (q, k, v, None)  # noqa: E731
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention_backward", backward, raising=False)
    x = torch.zeros(1, 2, 50, 8)
    attention_kernels.CudaEfficient.backward(x, x, x, x, x, torch.zeros(1, 2, 50))
    assert taken == [length]


def test_the_host_is_at_most_two_batches_ahead_of_a_gpu(monkeypatch):
    """Each of them holds memory on the device until its step is done."""
    waiting = []

    class Event:
        def synchronize(self):
            waiting.remove(self)

    def record_event():
        waiting.append(Event())
        return waiting[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=record_event))
    loader = BatchLoader(None, None, 1, 1, 1, torch.device("cuda"))
    loader._shared_batches = lambda indices, iterations: iter(iterations)
    loader.dataset, ahead = range(9), []
    for _ in loader.train(0, 0, 9):
        ahead.append(len(waiting))
    assert ahead == [0, 1, 2, 2, 2, 2, 2, 2, 2]


def test_pinned_copies_of_a_checkpoint_are_freed_on_the_device_of_the_rank(monkeypatch, tmp_path):
    """A call of CUDA in a thread makes a context on the thread's device, 0 unless it is set: hundreds of MB."""
    current, dropped, pinned, freed_on = threading.local(), threading.Event(), [], []
    index, save = lambda: getattr(current, "index", 0), dcp.save
    for name, value in {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "current_accelerator": lambda: torch.device("cuda"),
        "current_device_index": index,
        "set_device_index": lambda device: setattr(current, "index", device),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.append(address) or 0,
        cudaHostUnregister=lambda address: freed_on.append(index()) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(dcp, "save", lambda *args, **options: dropped.wait(20) and save(*args, **options))
    torch.accelerator.set_device_index(3)
    folder = checkpoint.CheckpointFolder(tmp_path, keep=1)
    folder.save(1, {"model": {"weight": torch.ones(64)}}, {})  # the tensor, and torch's buffer for it, end here
    dropped.set()
    folder.wait()
    assert len(pinned) == 1 and freed_on == [3]


@pytest.mark.gpu
def test_a_slot_is_pinned_for_the_gpu():
    slot = Slot(15, pinned=True)
    slot.tensor[:] = 2
    assert slot.tensor.is_pinned() and slot.tensor.to("cuda", non_blocking=True).sum().item() == 30
