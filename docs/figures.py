"""Tables, outputs and pictures of README and docs, made anew from the commands beside them: `make figures`.

A page holds what it shows between two comments. The first is Python, which cog (https://cog.readthedocs.io) runs, and
what that prints replaces the text up to the second. The command is the one that the page shows above it:

    ```bash
    python benchmark.py layouts dp --config=quick
    ```
    <!--[[[cog table(above()) ]]]-->
    <!--[[[end]]]-->

Commands run one after another, each once, in a folder that shares all of this one but `logs`, which is empty. The
variable ONLY chooses among them: a part of the command, or `fast`, which are the ones that take seconds and give the
same on every machine. What is not chosen stays as it is. A test holds every page to its fast ones. Of the others,
docs/figures.json keeps a hash of what each one's figures rest on; one that changed since is named, and fails a test.
"""

import ast
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import cog

from tools.tables import format_table
from utils.config import parse_yaml
from utils.schema import keys_that_affect

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs/figures.json"  # {command: hash of its inputs when it was last run}
CONFIGS = "ViT", "mp", "shard", "aurora", "hardware"  # files of named configs and GPUs
MODELS = "afno", "classifier", "neighborhood", "unet"  # those that only their own commands rest on
UNNAMED = {  # words of a command, and what it rests on without naming it: a config, a GPU or a file of config/
    "benchmark.py ladder": "ladder", "tools.gpu_report": "gpu_report", "planner.validate": "verify",
    "plan.py": "a100-40gb", "layouts mp": "mp_quick", "layouts domain": "classify_quick",
}  # fmt: skip
ONLY = os.environ.get("ONLY", "")
LOG_TIME = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
_kept: set[tuple[str, int]] = set()  # blocks that stay as they are; a block may show several things of one command
_told: set[str] = set()  # commands whose inputs changed


def inputs(command: str, root: Path = ROOT) -> str:
    """Hash of what determines losses, counts and FLOP of a command: values of its configs, and code.

    The code is that of its model, and of the examples and tests that it runs. Comments and docstrings do not count.
    """
    files = {file.stem: _mappings(file) for file in sorted((root / "config").glob("*.yaml"))}
    unnamed = [name for words, name in UNNAMED.items() if words in command]
    found: list[Any] = [files[name] for name in unnamed if name in files]
    words = sorted({*unnamed, *re.findall(r"[\w.-]+", f"{command} {found}")})
    found += [files[stem][word] for stem in CONFIGS for word in words if word in files[stem]]
    values = json.dumps(found, sort_keys=True)
    code = [root / f"{word.replace('.', '/')}.py" for word in words if re.match(r"docs\.examples|tests\.", word)]
    if found or ".py" in command:
        own = [model for model in MODELS if model in command + values]
        code += [root / f"networks/{name}.py" for name in ("vit", *own)]
    return hashlib.sha256("".join([values, *map(_code_alone, code)]).encode()).hexdigest()[:12]


@cache
def _mappings(path):
    """The named configs of a file, without keys that affect nothing."""
    unused, mappings = keys_that_affect("nothing"), parse_yaml(path.read_text())
    return {name: {k: v for k, v in values.items() if k not in unused} for name, values in mappings.items()}


@cache
def _code_alone(path):
    """The code of a file without comments and docstrings, the same under every Python."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return re.sub(r", \w+=\[\]|\b\w+=\[\](, )?", "", ast.dump(tree))  # Python 3.13 leaves out what is empty


def above(n: int = 1) -> str:
    """Return the command that a page shows above this place, in the n-th block of bash from here."""
    before = Path(cog.inFile).read_text().splitlines()[: cog.firstLineNum]
    blocks = re.findall(r"^```bash\n(.*?)\n```$", "\n".join(before), re.DOTALL | re.MULTILINE)
    return re.sub(r" \\\n *", " ", blocks[-n])


def table(command: str, which: int = 0, columns: str = ".*", rows: str = "", fast: bool = False) -> None:
    """Show a Markdown table of a command's output.

    which: the first, second, ... table that it prints, from 0. columns: regular expression of the titles to show; rows:
    of something in each row to show.
    """
    if not _chosen(command, fast):
        return
    lines = re.findall(r"(?:^ *\|.*\n)+", _output(command, fast), re.M)[which].splitlines()
    lines = [line.strip() for line in lines[:2] + [line for line in lines[2:] if re.search(rows, line)]]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kept = [i for i, title in enumerate(head) if re.fullmatch(columns, title)]
    if len(kept) < len(head):
        lines = [format_table({head[i]: "" for i in kept}, [[row[i] for i in kept] for row in body])]
    _show(*lines, "")


def output(command: str, only: str = ".*", fast: bool = False) -> None:
    """Show what a command prints (a log without its times), or its lines that match a regular expression, as code."""
    if _chosen(command, fast):
        lines = [re.sub(LOG_TIME, "", line).rstrip() for line in _output(command, fast).strip("\n").splitlines()]
        lines = [line for line in lines if re.match(only, line)]
        _show("```text", *lines, "```")


def picture(command: str, made: str, image: str, title: str) -> None:
    """Show a picture that a command leaves behind. made: its path; image: its name in docs/images."""
    if _chosen(command, fast=False):
        _output(command)
        shutil.copyfile(Path(_workspace().name) / made, ROOT / "docs/images" / image)
        images = os.path.relpath(ROOT / "docs/images", (ROOT / cog.inFile).parent)
        _show(f"![{title}]({images}/{image})", "")


def source(path: str, first: str, last: str, docstrings: bool = True) -> None:
    """Show the code of a file from the line that begins with `first` to the next one that begins with `last`.

    docstrings: whether to show them too.
    """
    lines = (ROOT / path).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(i for i, line in enumerate(lines) if i >= start and line.strip().startswith(last))
    code = textwrap.dedent("\n".join(lines[start : stop + 1]))
    _show("```python", code if docstrings else _without_docstrings(code), "```")


def difference(before: str, after: str, whole: bool = True) -> None:
    """Show what one script has more and less than another, docstrings aside; whole: with the lines."""
    one, two = _code(before), _code(after)
    changes = list(difflib.unified_diff(one, two, n=0))[2:]
    more, less = (sum(line[0] == sign for line in changes) for sign in "+-")
    _show(f"- `{before}` -> `{after}`: +{more} -{less} lines, {len(one) - less} stay")
    if whole:
        lines = ["" if line[0] == "@" else line for line in changes[1:]]
        _show("", "```diff", *(line for line in lines if line not in ("+", "-")), "```")


def _without_docstrings(code):
    lines = code.splitlines()
    described = (n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.ClassDef | ast.FunctionDef))
    found = [node.body[0] for node in described if ast.get_docstring(node)]
    hidden = {i for text in found for i in range(text.lineno - 1, text.end_lineno)}
    hidden |= {text.end_lineno for text in found if not lines[text.end_lineno]}  # the blank line behind that of a class
    return "\n".join(line for i, line in enumerate(lines) if i not in hidden)


def _code(name):
    """Lines of a script behind its docstring."""
    text = (ROOT / name).read_text()
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def _chosen(command, fast):
    """Tell whether to make this one; if not, the page keeps what it shows."""
    chosen = fast if ONLY == "fast" else ONLY in command
    if not chosen and not fast and _record().get(command) != inputs(command) and command not in _told:
        _told.add(command)
        print(
            f"{cog.inFile}: `{command}`: its inputs changed since: run make figures ONLY='{command}'", file=sys.stderr
        )
    if not chosen and (block := (cog.inFile, cog.firstLineNum)) not in _kept:
        _kept.add(block)
        cog.out(cog.previous)
    return chosen


def _show(*lines):
    cog.outl("\n".join(lines))


@cache
def _output(command, fast=False):
    print(f"$ {command}", file=sys.stderr, flush=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=_workspace().name, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nerror: status {done.returncode}: {command}")
    if not fast and "--check" not in sys.argv:
        RECORD.write_text(json.dumps(_record() | {command: inputs(command)}, indent=1, sort_keys=True) + "\n")
    return done.stdout


def _record():
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


@cache
def _workspace():
    """A folder like this one without runs; it goes when Python ends."""
    folder = tempfile.TemporaryDirectory(prefix="figures-")
    for path in ROOT.iterdir():
        if path.name not in ("logs", ".git"):
            (Path(folder.name) / path.name).symlink_to(path)
    return folder
