"""README and docs: every link leads somewhere, commands are those that the programs take, code is that of the tree."""

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import benchmark
import forecast
import plan
from tests import test_porting
from tests.support import programs
from tools.benchmarks import ladder, layouts, loaders, scaling
from tools.preflight import __main__ as preflight
from utils.command_line import parse_command_line
from utils.config import SCRIPTS, load_config
from weather.fields.grid import Grid
from weather.prepare_data import write_own_config

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob(".github/**/*.md")]
)
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
SUBMITS = {
    "submit_pm.sh": "train.py", "submit_dp.sh": "train.py", "submit_mp.sh": "train_mp.py",
    "submit_shard.sh": "train_shard.py", "submit_forecast.sh": "forecast.py",
    "submit_preflight.sh": "tools/preflight/__main__.py",
}  # fmt: skip
GPUS_PER_NODE = 4


class Parsed(Exception):
    """A program has taken its options."""


def code(page):
    """Lines of code of a Markdown page, fenced or indented, continued ones joined."""
    fenced, lines = False, []
    for line in page.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line.strip().removeprefix("$ "))
    return lines


def commands():
    found = {}
    for page in PAGES:
        for line in code(page):
            if re.match(r"(\.venv/bin/)?(python3?(?! -c| -\s)|torchrun|sbatch|make) [^=(]", line) and "..." not in line:
                found.setdefault(line, page)
    return [pytest.param(line, id=f"{page.relative_to(ROOT)}: {line[:60]}") for line, page in found.items()]


def ranks_of(words):
    """Ranks that torchrun or sbatch start, and the words from the program on."""
    start = next(i for i, word in enumerate(words) if word.endswith((".py", ".sh")) or word == "-m")
    options = " ".join(words[:start])
    number = {name: int(n) for name, n in re.findall(r"(-N|-n|--nproc_per_node|--ntasks-per-node)[ =](\d+)", options)}
    per_node = number.get("--ntasks-per-node", GPUS_PER_NODE)
    ranks = number.get("--nproc_per_node") or number.get("-n") or number.get("-N", 0) * per_node or 1
    return ranks, words[start:]


@pytest.mark.parametrize("line", commands())
def test_a_command_is_one_that_the_programs_take(line, tmp_path):
    words = shlex.split(line, comments=True)
    if "own" in words:  # the config that weather.prepare_data writes beside the data
        write_own_config(tmp_path, Grid(np.linspace(55, 43.5, 24), np.linspace(-10, 9.5, 40)), ["t2m", "u10", "swh"])
        place = words.index("--yaml_config") + 1
        assert words[place].endswith("/config.yaml")
        words[place] = str(tmp_path / "config.yaml")
    if words[0] == "make":
        assert all(word in TARGETS or "=" in word for word in words[1:])
        return
    if "--wrap" in words:
        return
    ranks, (program, *words) = ranks_of(words)
    program = Path(program).name
    program = SUBMITS.get(program, program)
    if program == "-m":
        assert importlib.util.find_spec(words[0]), words[0]
        if words[0] == "tools.preflight":
            preflight.parse(words[1:])
    elif program == "tools/preflight/__main__.py":
        preflight.parse(words)
    elif program in SCRIPTS:
        if "--help" not in words:
            load_config(words, None, ranks, *SCRIPTS[program][:2])
    elif program == "benchmark.py":
        check_benchmark(words)
    elif program == "plan.py":
        parts = [
            "tools.planner.calibrate.read_launch",
            "tools.planner.validate.verify",
            "tools.layout_check.check.check_machine",
            "tools.compositions.search.Base",
        ]
        parts += ["plan.load_gpu", "plan.compare"]
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(mock.patch(part, side_effect=Parsed))
            stack.enter_context(pytest.raises(Parsed))
            plan.main(words)
    else:
        assert program == "forecast.py", program
        with mock.patch.object(forecast, "read_launch", side_effect=Parsed), pytest.raises(Parsed):
            forecast.main(words)


def check_benchmark(words):
    """Its options are taken, and what is left are options of a config."""
    seen = []

    def run(words, **_given):
        seen.append(words)
        raise Parsed

    with contextlib.ExitStack() as stack:
        for module in (ladder, layouts, loaders, scaling):
            stack.enter_context(mock.patch.object(module, "run", run))
        with pytest.raises(Parsed):
            benchmark.main(words)
    parse_command_line(seen[0], None, "config/ViT.yaml")


def check_figures(only, root=ROOT):
    """Pages show what cog makes of them. only: the commands to run, as ONLY of `make figures`; code is always made.

    root: a folder with everything of this repository, for runs that need data.
    """
    functions = "from docs.figures import above, difference, output, picture, reading, source, table"
    words = ["-I", ".", "-U", "-p", functions]
    pages = [str(page.relative_to(ROOT)) for page in PAGES if "[[[cog" in page.read_text()]
    done = subprocess.run(
        [sys.executable, "-m", "cogapp", *words, "--check", "--diff", *pages],
        cwd=root, env={**os.environ, "ONLY": only}, capture_output=True, text=True,
    )  # fmt: skip
    assert len(pages) > 5
    assert done.returncode == 0, done.stdout + done.stderr
    stale = [line for line in done.stderr.splitlines() if "its inputs changed" in line]
    assert not stale, "\n".join(stale)


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("config/ViT.yaml", "embed_dim: 128", "embed_dim: 256", True),
        ("config/ViT.yaml", "embed_dim: 128", "embed_dim: 128 # small", False),
        ("config/ViT.yaml", "embed_dim: 384", "embed_dim: 768", False),  # of other configs
        ("networks/vit.py", "1e-6", "1e-5", True),
        ("networks/vit.py", "\ndef ", "\n# A comment.\ndef ", False),
        ("networks/vit.py", '"""', '"""In short: ', False),
        ("networks/unet.py", "\nclass ", "\nwidth = 1\nclass ", False),  # another model
    ],
)
def test_figures_rest_on_values_and_code(file, old, new, changed, tmp_path, monkeypatch):
    """A change of these, and of nothing else, makes the figures of a command stale."""
    monkeypatch.setitem(sys.modules, "cog", types.ModuleType("cog"))
    inputs = importlib.import_module("docs.figures").inputs
    for folder in ("config", "networks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    text = (ROOT / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))
    command = "python train.py --config=quick"
    assert (inputs(command, tmp_path) != inputs(command)) is changed


@pytest.mark.parametrize(
    ("only", "command", "fast", "is_chosen"),
    [
        ("", "make demo", False, True),
        ("make demo", "make demo", False, True),
        ("make demo", "make demo-ensemble", False, False),  # another command, which has it as a part
        ("quick", "python train.py --config=quick", False, True),
        ("none", "python benchmark.py layouts dp --wrap_policy=none", False, False),
        ("fast", "make demo", False, False),
        ("fast", "python -m utils.layout", True, True),
    ],
)
def test_commands_are_chosen_whole_or_by_a_part(monkeypatch, only, command, fast, is_chosen):
    monkeypatch.setitem(sys.modules, "cog", types.ModuleType("cog"))
    figures = importlib.import_module("docs.figures")
    monkeypatch.setattr(figures, "ONLY", only)
    assert figures._is_asked_for(command, fast) is is_chosen


def test_pages_show_code_of_the_tree_and_figures_whose_inputs_did_not_change_since():
    """`make figures ONLY=...` mends the pages."""
    check_figures(only="no command")


@pytest.mark.slow("what pages show is what their commands print today")
def test_what_pages_show_of_commands_marked_fast_is_what_they_print(tmp_path, monkeypatch):
    """They are run in full; `make figures ONLY=fast` mends the pages."""
    programs.use_forks(tmp_path, monkeypatch)
    check_figures(only="fast")


@pytest.mark.nightly
@pytest.mark.slow("a page prints losses in all digits")
@pytest.mark.timeout(900)
def test_losses_that_a_page_prints_are_those_of_its_runs(tmp_path, monkeypatch):
    """The lessons' losses are compared with those of their notebooks (tests/test_notebook.py)."""
    if torch.accelerator.is_available():
        pytest.skip("the pages show runs on a CPU")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)  # of tests/conftest.py
    for path in ROOT.iterdir():
        if path.name not in ("logs", "data", ".git", ".venv"):
            (tmp_path / path.name).symlink_to(path)
    assert programs.run(["-m", "weather.sample_data", tmp_path / "data/quick"]).returncode == 0
    programs.use_forks(tmp_path / ".venv/bin", monkeypatch)
    check_figures("--rollout_steps=4 --num_iters=40", tmp_path)


def is_python(block):
    """Tell whether an indented block of a page is code of Python."""
    with contextlib.suppress(SyntaxError), warnings.catch_warnings(action="ignore"):
        return bool(ast.parse(textwrap.dedent(block)).body)
    return False


def written_by_hand(text):
    """Code of Python in a page that no command has inserted, and differences of it."""
    inserted = r"^<!--\[\[\[cog\s(source|difference|reading)\(.*?^<!--\[\[\[end\]\]\]-->$"
    text = re.sub(inserted, "", text, flags=re.S | re.M)
    fences = r"^ *(`{3,}|~{3,}) *(\S*).*\n([\s\S]*?)^ *\1 *$"
    blocks = [code for _, kind, code in re.findall(fences, text, re.M) if kind not in ("bash", "text", "yaml")]
    indented = re.findall(r"(?:^(?: {4}|\t).*\n(?:\s*\n(?= {4}))?)+", re.sub(fences, "", text, flags=re.M), re.M)
    return blocks + [block for block in indented if is_python(block)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_a_page_is_inserted_from_the_tree_or_run_from_the_page(page):
    """docs/porting.md writes files and a diff of them: tests/test_porting.py runs these."""
    run = [f"# {name}\n{code}" for name, code in test_porting.FILES.items()] + [test_porting.DIFF]
    for block in written_by_hand(page.read_text()):
        assert page.name == "porting.md" and block in run, block


@pytest.mark.parametrize(
    "block", ["```python\nf(x)\n```\n", "    y = f(x)\n", "```\nf(x)\n```\n", "~~~ py\nf(x)\n~~~\n"]
)
def test_python_written_by_hand_is_found(block):
    inserted = '<!--[[[cog source("train.py", "a", "b") ]]]-->\n```python\nf(x)\n```\n<!--[[[end]]]-->\n'
    for text in (f"Text\n\n{block}\nText\n", f"{inserted}\n{block}\n{inserted}"):
        assert len(written_by_hand(text)) == 1
    assert not written_by_hand(f"{inserted}\n    python train.py\n\n```bash\nmake\n```\n{inserted}")


def slug(heading):
    """The anchor that a heading gets on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def headings(page):
    return {
        slug(re.sub(r"[`*]", "", line.lstrip("#"))) for line in page.read_text().splitlines() if line.startswith("#")
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: no {target}"
        if anchor and file.suffix == ".md":
            assert anchor in headings(file), f"{page.name}: {file.name} has no heading #{anchor}"
