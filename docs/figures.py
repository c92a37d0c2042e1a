"""Tables, outputs and pictures of README and docs, made anew from the commands beside them: `make figures`.

A page holds what it shows between two comments. The first is Python, which cog (https://cog.readthedocs.io) runs, and
what that prints replaces the text up to the second. The command is the one that the page shows above it:

    ```bash
    python benchmark.py layouts dp --config=quick
    ```
    <!--[[[cog table(above()) ]]]-->
    <!--[[[end]]]-->

Commands run one after another, each once, in a folder that shares all of this one but `logs`, which is empty. The
variable ONLY chooses among them: a command, a part that several have, `fast`, which are the ones that take seconds and
give the same on every machine, or `none`. What is not chosen stays as it is. A test holds every page to its fast ones.
Of the others, docs/figures.json keeps a hash of what each one's figures rest on; one that changed since is named, and
fails a test.
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

from tools.plain_code import lines_of, name_of, read_source
from tools.tables import format_table
from utils.schema import keys_that_affect
from utils.yaml_files import parse_yaml

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs/figures.json"  # {command: hash of its inputs when it was last run}
CONFIGS = ("ViT", "mp", "shard", "aurora", "hardware")  # files of named configs and GPUs
MODELS = ("afno", "classifier", "neighborhood", "unet")  # those that only their own commands rest on
# Words of a command, and what it rests on without naming it: a config, a GPU or a file of config/.
UNNAMED = {
    "benchmark.py ladder": "ladder",
    "make demo-ensemble": "demo_ensemble",
    "tools.gpu_report": "gpu_report",
    "planner.validate": "verify",
    "plan.py": "a100-40gb",
    "layouts mp": "mp_quick",
    "layouts domain": "classify_quick",
}
ONLY = os.environ.get("ONLY", "")
LOG_TIME = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
_kept: set[tuple[str, int]] = set()  # blocks that stay as they are; a block may show several things of one command
_told: set[str] = set()  # commands whose inputs changed


def inputs(command: str, root: Path = ROOT) -> str:
    """Hash of what determines losses, counts and FLOP of a command: values of its configs, and code.

    The code is that of its model, and of the examples and tests that it runs. Comments and docstrings do not count.
    """
    # A command may name a config, and the values of that config may name another one or code.
    yaml_files = [*sorted((root / "config").glob("*.yaml")), *sorted((root / "tools").rglob("*.yaml"))]
    files = {file.stem: _mappings(file) for file in yaml_files}  # {file: {name: values}}
    unnamed = [name for words, name in UNNAMED.items() if words in command]
    found: list[Any] = [files[name] for name in unnamed if name in files]
    named = re.findall(r"[\w.-]+", f"{command} {found}")
    words = sorted({*unnamed, *named})
    for stem in CONFIGS:
        found += [files[stem][word] for word in words if word in files[stem]]
    values = json.dumps(found, sort_keys=True)

    code = []
    for word in words:
        if re.match(r"docs\.examples|tests\.", word):
            code.append(root / f"{word.replace('.', '/')}.py")
    runs_a_model = bool(found) or ".py" in command
    if runs_a_model:
        models = [model for model in MODELS if model in command + values]
        code += [root / f"networks/{name}.py" for name in ("vit", *models)]
    text = "".join([values, *map(_code_alone, code)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _mappings(path):
    """The named configs of a file, without keys that affect nothing."""
    unused = keys_that_affect("nothing")
    mappings = {}
    for name, values in parse_yaml(path.read_text()).items():
        mappings[name] = {key: value for key, value in values.items() if key not in unused}
    return mappings


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
    lines = Path(cog.inFile).read_text().splitlines()
    before = "\n".join(lines[: cog.firstLineNum])
    blocks = re.findall(r"^```bash\n(.*?)\n```$", before, re.DOTALL | re.MULTILINE)
    return re.sub(r" \\\n *", " ", blocks[-n])  # a command that is broken into lines is one line


def table(command: str, which: int = 0, columns: str = ".*", rows: str = "", fast: bool = False) -> None:
    """Show a Markdown table of a command's output.

    which: the first, second, ... table that it prints, from 0. columns: regular expression of the titles to show; rows:
    of something in each row to show.
    """
    if not _chosen(command, fast):
        return
    tables = re.findall(r"(?:^ *\|.*\n)+", _output(command, fast), re.M)
    title_line, rule, *others = [line.strip() for line in tables[which].splitlines()]
    body = [line for line in others if re.search(rows, line)]
    titles = _cells(title_line)
    kept = [i for i, title in enumerate(titles) if re.fullmatch(columns, title)]
    if len(kept) == len(titles):
        _show(title_line, rule, *body, "")
        return

    # Without some columns the widths differ, so the table is made again.
    cells = []
    for line in body:
        row = _cells(line)
        cells.append([row[i] for i in kept])
    _show(format_table({titles[i]: "" for i in kept}, cells), "")


def _cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def output(command: str, only: str = ".*", fast: bool = False) -> None:
    """Show what a command prints (a log without its times), or its lines that match a regular expression, as code."""
    if not _chosen(command, fast):
        return
    lines = []
    for line in _output(command, fast).strip("\n").splitlines():
        without_time = re.sub(LOG_TIME, "", line).rstrip()
        if re.match(only, without_time):
            lines.append(without_time)
    _show("```text", *lines, "```")


def picture(command: str, made: str, image: str, title: str) -> None:
    """Show a picture that a command leaves behind. made: its path; image: its name in docs/images."""
    if not _chosen(command, fast=False):
        return
    _output(command, False)
    # The workspace goes when Python ends, so its picture is copied.
    shutil.copyfile(Path(_workspace().name) / made, ROOT / "docs/images" / image)
    page = ROOT / cog.inFile
    images = os.path.relpath(ROOT / "docs/images", page.parent)
    _show(f"![{title}]({images}/{image})", "")


def source(path: str, first: str, last: str, docstrings: bool = True) -> None:
    """Show the code of a file from the line that begins with `first` to the next one that begins with `last`.

    docstrings: whether to show them too.
    """
    lines = (ROOT / path).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    # Counted from 1, the line that begins with `last` is shown too.
    length = next(i for i, line in enumerate(lines[start:], 1) if line.strip().startswith(last))
    code = textwrap.dedent("\n".join(lines[start : start + length]))
    if not docstrings:
        code = _without_docstrings(code)
    _show("```python", code, "```")


def difference(before: str, after: str, whole: bool = True) -> None:
    """Show what one script has more and less than another, docstrings aside; whole: with the lines."""
    old = _code(before)
    new = _code(after)
    changes = list(difflib.unified_diff(old, new, n=0))[2:]  # without the names of the files
    more = sum(line[0] == "+" for line in changes)
    less = sum(line[0] == "-" for line in changes)
    _show(f"- `{before}` -> `{after}`: +{more} -{less} lines, {len(old) - less} stay")
    if not whole:
        return
    shown = []
    # The head of each place becomes a blank line, except that of the first.
    for line in changes[1:]:
        if line[0] == "@":
            shown.append("")
        elif line not in ("+", "-"):
            shown.append(line)
    _show("", "```diff", *shown, "```")


def reading(*steps: tuple[str, str, str]) -> None:
    """Show what to read, in order: (file, names of its functions and classes, or "" for all; what to see there).

    Lines are those of code, without blanks, comments and docstrings, to two digits: a page is not stale by one line.
    """
    rows = []
    total = 0
    for path, names, lesson in steps:
        lines = _lines_of_code(path, names.split())
        total += lines
        link = os.path.relpath(ROOT / path, (ROOT / cog.inFile).parent)
        shown = ", ".join(f"`{name}`" for name in names.split())
        rows.append([f"[{path}]({link})", shown or "all of it", _two_digits(lines), lesson])
    rows.append(["together", "", _two_digits(total), ""])
    titles = {"file": "", "read": "", "lines, about": "d", "see": ""}
    _show(format_table(titles, rows, words=("read", "see")), "")


def _two_digits(number):
    return int(float(f"{number:.1e}"))


def _lines_of_code(path, names):
    code = read_source(ROOT / path)
    if not names:
        return len(code.starts)
    places = {name_of(node): lines_of(node) for node in code.tree.body}
    chosen = [places[name] for name in names]
    return sum(first <= line <= last for first, last in chosen for line in code.starts)


def _without_docstrings(code):
    lines = code.splitlines()
    hidden: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or not ast.get_docstring(node):
            continue
        text = node.body[0]
        last = text.end_lineno or text.lineno
        hidden.update(range(text.lineno - 1, last))
        if not lines[last]:  # the blank line behind the docstring of a class
            hidden.add(last)
    return "\n".join(line for i, line in enumerate(lines) if i not in hidden)


def _code(name):
    """Lines of a script behind its docstring."""
    text = (ROOT / name).read_text()
    docstring = ast.parse(text).body[0]
    return text.splitlines()[docstring.end_lineno :]


def _chosen(command, fast):
    """Tell whether to make this one; if not, the page keeps what it shows."""
    if _is_asked_for(command, fast):
        return True
    # A page whose command was not chosen is named where its inputs have changed.
    if not fast and command not in _told and _record().get(command) != inputs(command):
        _told.add(command)
        said = f"{cog.inFile}: `{command}`: its inputs changed since: run make figures ONLY='{command}'"
        print(said, file=sys.stderr)
    # cog shows the previous text of a block once, however many commands the block has.
    block = (cog.inFile, cog.firstLineNum)
    if block not in _kept:
        _kept.add(block)
        cog.out(cog.previous)
    return False


def _is_asked_for(command, fast):
    """Tell whether ONLY names a command."""
    if ONLY == "none":
        return False
    if ONLY == "fast":
        return fast
    # A whole command is not meant as a part of longer ones.
    return command == ONLY if ONLY in _record() else ONLY in command


def _show(*lines):
    cog.outl("\n".join(lines))


@cache
def _output(command, fast):
    print(f"$ {command}", file=sys.stderr, flush=True)
    # Commands begin with `python`, which has to be the one that runs this.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=_workspace().name,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nerror: status {done.returncode}: {command}")
    # A check may run commands, and must not change what is recorded of them.
    if not fast and "--check" not in sys.argv:
        record = _record() | {command: inputs(command)}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return done.stdout


def _record():
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


@cache
def _workspace():
    """A folder like this one without runs; it goes when Python ends."""
    folder = tempfile.TemporaryDirectory(prefix="figures-")
    # Links cost nothing, and commands see the files as they are.
    for path in ROOT.iterdir():
        if path.name not in ("logs", ".git"):
            (Path(folder.name) / path.name).symlink_to(path)
    return folder
