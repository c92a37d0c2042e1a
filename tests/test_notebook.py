"""start_tensorboard.ipynb: what it serves, to whom, and that nothing of it stays behind. The lessons as notebooks."""

import json
import os
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.support import programs
from tests.support.launch import wait_until
from tests.support.refusals import refusal
from tools import tensorboard_server
from tools.tensorboard_server import find_log_folder

nbformat = pytest.importorskip("nbformat", reason="pip install -r requirements/dev.txt")
NotebookClient = pytest.importorskip("nbclient", reason="pip install -r requirements/dev.txt").NotebookClient
notebooks = pytest.importorskip("docs.notebooks")
NOTEBOOK = Path("start_tensorboard.ipynb")


@pytest.fixture
def logs(tmp_path):
    with SummaryWriter(tmp_path / "runs/quick/00") as writer:
        writer.add_scalar("Loss/train", 0.5, 10)
    return tmp_path / "runs"


@pytest.fixture
def no_settings(monkeypatch):
    for name in ("LOGDIR", "LOG_DIR", "EXPDIR", "JUPYTERHUB_SERVICE_PREFIX", "JPY_PARENT_PID", "SLURM_SUBMIT_HOST"):
        monkeypatch.delenv(name, raising=False)


def get(url):
    """Status and body."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def servers(kernel):
    """Children of the kernel that run the server."""
    return [p for p in kernel.children(recursive=True) if "tools.tensorboard_server" in p.cmdline()]


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_serves_the_runs_to_its_user_alone_and_leaves_nothing_behind(logs, tmp_path, no_settings):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": "."}})
    folders = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    with client.setup_kernel(env={**os.environ, **folders, "LOGDIR": str(logs)}):
        kernel = psutil.Process(client.km.provisioner.process.pid)

        def run(cell):
            return printed(client.execute_cell(cell, notebook.cells.index(cell)))

        *_, start, stop = [cell for cell in notebook.cells if cell.cell_type == "code"]
        text = "".join(run(cell) for cell in notebook.cells if cell.cell_type == "code")
        assert str(logs) in text
        port, token = re.search(r"http://127\.0\.0\.1:(\d+)/([\w-]{40,})/", text).groups()
        site = f"http://127.0.0.1:{port}"

        assert get(f"{site}/{token}/")[0] == 200
        wait_until(lambda: json.loads(get(f"{site}/{token}/data/runs")[1]) == ["quick/00"])
        for path in ("", "/", "/data/runs", "/data/plugin/scalars/tags", f"/{token[:-1]}/", f"/{token}x/data/runs"):
            status, body = get(site + path)
            assert status == 404 and "quick" not in body and token not in body

        [server] = servers(kernel)
        assert not server.children()
        listening = [c.laddr for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert listening == [("127.0.0.1", int(port))]
        assert not any(token in word for p in (kernel, server) for word in p.cmdline())

        stop.source = stop.source.removeprefix("# ")
        run(stop)
        assert is_gone(server)

        again = run(start)
        [server] = servers(kernel)
        assert token not in again
        run(start)  # a second start takes the place of the first
        wait_until(lambda: is_gone(server))
        [server] = servers(kernel)
        kernel.kill()
        wait_until(lambda: is_gone(server))


def test_the_committed_notebook_has_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None


def test_the_log_folder_is_found_by_each_rule(tmp_path, monkeypatch, no_settings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tensorboard_server, "ROOT", tmp_path)
    with refusal("example_logs: no such log folder"):
        find_log_folder()
    for folder in ("example_logs", "logs", "expdir", "log_dir", "logdir", "given"):
        Path(folder).mkdir()
        if folder.endswith("dir"):
            monkeypatch.setenv(folder.upper(), folder)
        assert find_log_folder("given" if folder == "given" else None) == tmp_path / folder
    with refusal("nowhere: no such log folder"):
        find_log_folder("nowhere")


def test_the_tunnel_line_names_this_host_and_in_a_batch_job_the_login_node(monkeypatch, no_settings):
    monkeypatch.setattr(tensorboard_server.getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(tensorboard_server.socket, "getfqdn", lambda: "node7.site.org")
    assert tensorboard_server.tunnel_command(4321) == "ssh -N -L 4321:127.0.0.1:4321 ann@node7.site.org"
    monkeypatch.setenv("SLURM_SUBMIT_HOST", "login2")
    assert tensorboard_server.tunnel_command(4321) == "ssh -N -L 4321:127.0.0.1:4321 -J ann@login2 ann@node7.site.org"


def test_the_jupyter_server_is_known_in_a_hub_and_from_its_record(tmp_path, monkeypatch, no_settings):
    assert tensorboard_server.jupyter_base_url() is None
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("JPY_PARENT_PID", "77")
    assert tensorboard_server.jupyter_base_url() is None
    (tmp_path / "jpserver-77.json").write_text(json.dumps({"base_url": "/lab/", "port": 8888}))
    assert tensorboard_server.jupyter_base_url() == "/lab/"
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ann/")
    assert tensorboard_server.jupyter_base_url() == "/user/ann/"


def test_the_example_logs_hold_one_finished_run_whose_curves_end_at_its_summary():
    folder = Path("example_logs/demo/example")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["run"] == "logs/demo/00"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1.2e6
    events = EventAccumulator(str(folder)).Reload()
    last = events.Scalars("Loss/valid")[-1]
    assert last.step == summary["iterations"] == 3600
    assert last.value == pytest.approx(summary["val_loss"])
    assert set(events.Tags()["images"]) == {"forecast/u10", "forecast/z500"}
    readings = [json.loads(line) for line in (folder / "metrics-rank0.jsonl").read_text().splitlines()]
    assert readings[-1]["iteration"] == 3600 and readings[-1]["gradient/norm"] > 0


def test_the_example_profiles_can_be_read(tmp_path):
    shutil.copytree("example_logs/profiles/two_ranks", tmp_path / "run")
    done = programs.run(["-m", "tools.timeline", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    assert "late: rank" in done.stdout and (tmp_path / "run/profile/timeline.png").exists()


@pytest.mark.parametrize("name", notebooks.LESSONS)
def test_a_notebook_is_its_lesson(name):
    kept = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", 4)
    assert kept == notebooks.notebook(name), "make notebooks"
    commands = [cell.source for cell in kept.cells if cell.source.startswith("%%bash")]
    assert len(commands) > 1 and all("$RUNS" in text for text in commands if "train" in text)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Where the first notebook makes the sample data, and the others find it."""
    return tmp_path_factory.mktemp("data")


@pytest.mark.nightly
@pytest.mark.slow("every command of a lesson runs")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", notebooks.LESSONS)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path, data, monkeypatch):
    (tmp_path / "data").symlink_to(data)
    for path in notebooks.ROOT.iterdir():
        if path.name not in ("logs", "data", ".git", ".venv"):
            (tmp_path / path.name).symlink_to(path)
    programs.use_forks(tmp_path / ".venv/bin", monkeypatch)
    made = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", 4)
    NotebookClient(made, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(out.get("text", "") for cell in made.cells for out in cell.get("outputs", []))
    assert "finished 20 iterations" in printed or "finished 40 iterations" in printed
    assert printed.count("| ") > 20  # the table of the benchmark
    page = (notebooks.ROOT / f"docs/{name[2:]}.md").read_text()
    shown, losses = (re.findall(r"Avg train loss=\S+", text) for text in (page, printed))
    assert shown == losses[: len(shown)], "make figures ONLY='--num_iters 20': the page shows losses of another code"
