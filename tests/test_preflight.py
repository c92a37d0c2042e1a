"""tools.preflight: what holds is ok, what does not is named, with what to do, and nobody waits for ever."""

import os
import re
import socket
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.programs import finish, run_ranks, start_ranks
from tools.preflight import __main__ as preflight
from tools.preflight import checks
from tools.preflight.rendezvous import CheckResult, Rendezvous, limited, merge, shortened
from utils import device
from utils.launch import Launch


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch):
    """Ranks of these tests are more than the GPUs of a machine may be."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


AUTO = SimpleNamespace(device="auto")


@pytest.fixture
def words(tmp_path, sample_folder):
    """Options of a check that finds nothing wrong."""
    return ["--expdir", str(tmp_path / "logs"), "--train_data_path", str(sample_folder / "train")]


@pytest.fixture
def check(capsys):
    """Call with options: status of one process, and its lines."""

    def run(words):
        status = preflight.main(words)
        return status, capsys.readouterr().out.splitlines()

    return run


def lines_of(output, what):
    return [line for line in output if re.match(rf"(ok|warn|FAIL) +{what} ", line)]


def test_one_process_finds_nothing_wrong_and_leaves_nothing(check, words, tmp_path):
    status, output = check(words)
    assert status == 0 and "0 FAIL" in output[-1], output
    for what in ("python", "packages", "devices", "launch", "threads", "log folder", "data folder"):
        assert lines_of(output, what), what
    assert list((tmp_path / "logs").iterdir()) == []


def test_two_ranks_connect_and_their_collectives_are_right(words, tmp_path):
    (status, output), (other, nothing) = run_ranks(["-m", "tools.preflight", *words])
    assert (status, other, nothing) == (0, 0, "") and "0 FAIL" in output, output
    lines = output.splitlines()
    assert [line.split()[2] for line in lines_of(lines, "collectives")] == ["float32:", "bfloat16:"]
    for what in ("process group", "checkpoint group", "shared folder", "clocks", "bandwidth"):
        assert lines_of(lines, what)[0].startswith("ok"), what
    assert "2 ranks met" in lines[0] and "rank 0-1 (" in lines[0]
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize(
    "option, what, advice", [("--expdir", "log folder", "--expdir"), ("--train_data_path", "data folder", "docs/data")]
)
def test_a_folder_that_cannot_be_used_fails_with_advice(check, words, tmp_path, option, what, advice):
    (tmp_path / "file").touch()
    status, output = check([*words, option, str(tmp_path / "file/folder")])
    (line,) = lines_of(output, what)
    assert status == 1 and line.startswith("FAIL") and "file/folder" in line and advice in line


def test_without_any_data_it_says_how_to_make_some(check, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, output = check(words[:2])
    (line,) = lines_of(output, "data folder")
    assert status == 0 and line.startswith("warn") and "make demo" in line


def test_another_version_of_torch_warns_and_a_missing_package_fails(check, words, monkeypatch):
    real = checks.metadata.version
    monkeypatch.setattr(checks.metadata, "version", lambda name: "1.0+cu1" if name == "torch" else real(name))
    status, output = check(words)
    assert status == 0
    assert any(line.startswith("warn") and "torch 1.0+cu1, requirements.txt says" in line for line in output)

    def missing(name):
        raise checks.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.metadata, "version", missing)
    status, output = check(words)
    assert status == 1 and any(line.startswith("FAIL") and "torch is missing" in line for line in output)


def test_variables_that_slow_a_run_down_warn_and_a_wrong_interface_fails(check, words, monkeypatch):
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nonsense0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    monkeypatch.setattr(checks.torch, "get_num_threads", lambda: 1000)
    status, output = check(words)
    assert status == 1
    ib, interface = [line for line in lines_of(output, "variables") if "NCCL_" in line]
    assert ib.startswith("warn") and "InfiniBand" in ib
    assert interface.startswith("FAIL") and "nonsense0 - one of " in interface and "lo" in interface
    assert lines_of(output, "threads")[0].startswith("warn")


def test_the_device_that_is_asked_for_is_the_one_that_is_checked(check, words, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")  # which torch does not see
    for name, line in {
        "cpu": "ok    devices        training runs on the CPU",
        "auto": "FAIL  devices        Slurm gave this job GPUs (1 on this node), but torch ",
        "abacus": "FAIL  devices        device 'abacus': not a device torch knows",
    }.items():
        monkeypatch.setattr(checks.torch.accelerator, "is_available", lambda: False)
        status, output = check([*words, "--device", name])
        (found,) = lines_of(output, "devices")
        assert found.startswith(line) and status == (name != "cpu")


def test_ranks_with_a_device_connect_by_its_backend(words):
    gpus = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}  # none is needed where the CPU is asked for
    first, second = run_ranks(["-m", "tools.preflight", *words, "--device", "cpu"], **gpus)
    assert first[0] == 0 and "ok    process group  gloo, 2 ranks" in first[1], first
    assert second == (0, "")


NVIDIA = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:12:40 UTC 2025\nGCC version: 12.3.0"
DEVICES = [
    ("13.0", None, NVIDIA, "CUDA 13.0, driver its maker 580.65.06"),
    (None, "7.1", "6.12.12\n", "ROCm 7.1, driver its maker 6.12.12"),
]


@pytest.mark.parametrize(("cuda", "hip", "driver", "found"), DEVICES, ids=["NVIDIA", "AMD"])
@pytest.mark.parametrize("free", [60, 10])
def test_gpus_of_either_maker_are_shown_without_a_tool_of_theirs(monkeypatch, tmp_path, cuda, hip, driver, found, free):
    (tmp_path / "version").write_text(driver)
    monkeypatch.setattr(device, "DRIVERS", {str(tmp_path / "version"): "its maker"})
    monkeypatch.setenv("PATH", "")
    for name, value in {"cuda": cuda, "hip": hip}.items():
        monkeypatch.setattr(checks.torch.version, name, value)
    monkeypatch.setattr(checks, "select_device", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(checks.torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(checks.torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(checks.torch.cuda, "mem_get_info", lambda _: (free << 30, 64 << 30))
    (result,) = checks.devices(AUTO, Rendezvous(Launch(), 1))
    assert result.found == f"2 x cuda a GPU, {free} of 64 GiB free, {found}"
    assert result.level == ("ok" if free == 60 else "warn")


@pytest.mark.gpu
def test_gpus_are_counted_with_their_memory(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (result,) = checks.devices(AUTO, Rendezvous(Launch(), 1))
    assert re.match(r"\d+ x cuda .*, \d+ of \d+ GiB free, (CUDA|ROCm) .*", result.found), result.found


PREFLIGHT = ["-m", "tools.preflight"]


def test_a_rank_that_does_not_come_is_named_in_time(words):
    began = time.monotonic()
    outputs = [finish(process) for process in start_ranks([*PREFLIGHT, *words, "--timeout", "4"], 3, only=[0, 1])]
    assert time.monotonic() - began < 60
    for status, output in outputs:
        assert status == 1 and "rank 2 (" in output and "did not come within 4 s" in output, output
        assert "Traceback" not in output


@pytest.mark.slow("rank 0, which holds the store")
def test_a_rank_0_that_does_not_come_is_named_as_well(words):
    (process,) = start_ranks([*PREFLIGHT, *words, "--timeout", "2"], only=[1])
    status, output = finish(process)
    assert status == 1 and re.search(r"rank 0 \(.*\) cannot be met at 127.0.0.1:\d+ from ", output)


@pytest.mark.slow("a rank that is lost between two checks, which the others wait for")
def test_a_rank_that_comes_and_then_is_gone_is_named(words):
    processes = start_ranks([*PREFLIGHT, *words, "--timeout", "6"], 3)
    while not processes[0].said():
        assert processes[0].poll() is None
        time.sleep(0.02)
    assert "rank 0-2" in processes[0].said().splitlines()[0]
    processes[2].kill()
    status, output = finish(processes[0])
    assert status == 1 and "rank 2 (" in output and "did not reach" in output, output
    assert finish(processes[1])[0] == 1
    processes[2].wait()


def test_a_port_in_use_and_an_unknown_address_are_named(words, monkeypatch, check):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (process,) = start_ranks([*PREFLIGHT, *words, "--timeout", "2"], only=[0], port=taken.getsockname()[1])
        status, output = finish(process)
    assert status == 1 and "cannot be met" in output and "another program, have MASTER_PORT" in output
    ranks = Rendezvous(Launch(0, 0, 2, 1, "no.such.host.invalid", 1), 1)
    with pytest.raises(Exception, match=r"cannot be met at no\.such\.host\.invalid:1 .*is MASTER_ADDR its node"):
        ranks.connect()


def wrong_collectives(broken):
    """The result of the check on this rank, of a group in which one kind of collective does nothing."""
    with mock.patch.object(dist, "all_reduce", (lambda tensor, group=None: None) if broken else dist.all_reduce):
        return [result.line() for result in checks.collectives(torch.device("cpu"))]


def test_wrong_numbers_from_a_collective_are_seen(ranks):
    assert all(line.startswith("ok") for lines in ranks(3, wrong_collectives, False) for line in lines)
    for lines in ranks(3, wrong_collectives, True):
        assert [line.split(" - ")[0].split(": ")[-1] for line in lines] == ["wrong numbers from all_reduce"] * 2


def checkpoint_group(broken):
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "nonsense"} if broken else {}):
        return [result.line() for result in checks.checkpoint_group(5)]


def test_a_checkpoint_group_that_cannot_be_made_is_named_with_its_interface(ranks):
    assert all(line.startswith("ok    checkpoint group") for [line] in ranks(2, checkpoint_group, False))
    for [line] in ranks(2, checkpoint_group, True):
        assert line.startswith("FAIL  checkpoint group") and "gloo through nonsense: " in line
        assert line.endswith("GLOO_SOCKET_IFNAME: the interface by which the other nodes reach this one")


class Together:
    """Stands for several ranks: what this one exchanges is what the test says."""

    def __init__(self, **answers):
        self.answers = answers
        self.size, self.rank, self.patience, self.nodes = 3, 1, 0.2, ["a", "b", "b"]

    def exchange(self, key, value):
        return self.answers.get(key.split(": ")[-1], [value] * 3)

    names, by_node = Rendezvous.names, Rendezvous.by_node


def test_a_folder_that_is_not_shared_and_clocks_that_differ_are_seen(tmp_path):
    ranks = Together(seen=[0.0, None, None], clocks=[100.0, 100.1, 107.0])
    (folder,) = checks.shared_folder(SimpleNamespace(expdir=str(tmp_path)), ranks)
    assert folder.level == "FAIL" and "is not seen by rank 1-2 (b)" in folder.found
    (clock,) = checks.clocks(None, ranks)
    assert (clock.level, clock.found) == ("warn", "at most 7.0 s apart")


def test_results_of_some_ranks_say_whose_they_are():
    good, bad = CheckResult("ok", "x", "fine", "not shown"), CheckResult("FAIL", "x", "bad", "do")
    assert [f.line().split() for f in merge([[good], [bad], [bad]], Together())] == [
        ["ok", "x", "rank", "0", "(a):", "fine"],
        ["FAIL", "x", "rank", "1-2", "(b):", "bad", "-", "do"],
    ]


def test_a_check_that_raises_or_hangs_is_a_failure(words):
    options = SimpleNamespace(timeout=0.1)

    def hangs(*_):
        yield CheckResult("ok", "hangs", "so far")
        time.sleep(5)

    def raises(*_):
        raise ValueError("why")
        yield

    so_far, late = preflight.attempt(hangs, options, None)
    assert so_far.level == "ok" and late.level == "FAIL" and "not done after 0.2 s" in late.found
    assert preflight.attempt(raises, options, None)[0].found == "ValueError: why"
    assert limited(5, lambda: 3) == 3


def test_small_helpers():
    assert shortened([5, 1, 4, 6, 8]) == "1,4-6,8"
    unknown = checks.unknown_interfaces
    name = next(iter(checks.interface_addresses()))
    assert not unknown(name) and not unknown(f"={name}") and not unknown("^anything") and unknown("=nonsense")


def test_wrong_options_of_all_ranks_are_one_line():
    (status, first), (other, second) = run_ranks(["-m", "tools.preflight", "--timeout", "0"])
    assert (status, other, second) == (2, 2, "")
    assert first == "error: rank 0: argument --timeout: 0 is not within 0.1 to 1000000.0 (see --help)\n"
