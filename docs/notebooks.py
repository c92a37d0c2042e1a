"""The lessons as notebooks that run from top to bottom on a laptop: `make notebooks`.

Text stays text; a command that a lesson tells one to run becomes a cell. Its settings are cut down, so that a notebook
takes minutes on two cores. What the lesson shows of its own, longer run stays below, to compare with.
"""

import os
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
LESSONS = ("1_one_device", "2_data_parallel", "3_model_parallel", "4_domain_parallel")
# The sections whose commands run.
RUN = ("Run it here", "Where the time goes", "Where to put which group", "What you should see")
SHORTER = {  # what cuts a command down to a laptop; the options of a training command itself stay
    "train": "--device cpu --expdir $RUNS --num_iters 20 --warmup 5 --limit_nsamples 320 --limit_nsamples_val 16",
    "ladder": "--device cpu --depth 2 --steps 2 --rounds 1 --png $RUNS/ladder.png",
    "dp": "--device cpu --layouts ddp zero1 fsdp --sizes 2 --steps 1 --rounds 1 --png $RUNS/dp.png",
    "mp": "--device cpu --layouts tp2 cp2 pp2 --sizes 128 --steps 1 --rounds 1 --png $RUNS/mp.png",
    "domain": "--device cpu --sizes 128 256 --layouts dp2 domain2 --rounds 1 --png $RUNS/domain.png",
}
BEGIN = """\
# The repository's folder, its environment, a folder of their own for the runs of this notebook, and the sample data.
import os, subprocess, sys, tempfile
from pathlib import Path

if not Path("train.py").exists():
    os.chdir("..")
os.environ["PATH"] = f"{Path('.venv/bin').resolve()}:{os.environ['PATH']}"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # cores that others use too would wait for one another
Path("logs").mkdir(exist_ok=True)
os.environ["RUNS"] = tempfile.mkdtemp(prefix="notebook-", dir="logs")
if not Path("data/quick/train").exists():
    subprocess.run(["python", "-m", "weather.sample_data", "data/quick"], check=True)
print("runs go to", os.environ["RUNS"])"""


def notebook(lesson: str) -> nbformat.NotebookNode:
    """The notebook of a lesson, without outputs. lesson: its number and the name of its page, as in LESSONS."""
    page = (ROOT / f"docs/{lesson[2:]}.md").read_text()
    text = re.sub(r"<!--.*?-->\n?", "", page, flags=re.S)
    # The parts of a page: fenced blocks, indented blocks, headings of sections, and the text between them.
    parts = re.split(r"(^```[\s\S]*?^```\n|(?:^    .*\n(?:\n(?=    ))?)+|^## .*\n)", text, flags=re.M)
    cells = [new_code_cell(BEGIN)]
    section = ""
    kept: list[str] = []
    for part in parts:
        if part.startswith("## "):
            section = part[3:].strip()
        command = _command(part) if section in RUN else None
        if command is None:
            kept.append(part)
            continue
        cells.append(new_markdown_cell(_links("".join(kept))))
        cells.append(new_code_cell(f"%%bash\n{command}"))
        kept = []
    cells.append(new_markdown_cell(_links("".join(kept))))
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    begin, introduction, *others = cells
    made = new_notebook(cells=[introduction, begin, *others])
    made.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return made


def _command(part: str) -> str | None:
    """Commands of a block of code, cut down; None if it is none."""
    whole = part.replace("\\\n", " ").splitlines()
    lines = [line.strip() for line in whole if line.strip(" `\n") and line != "```bash"]
    is_code = part.startswith(("```bash", "    "))
    if not is_code or not all(re.match("python |torchrun ", line) for line in lines):
        return None
    commands = []
    for line in lines:
        without_comment = line.partition(" #")[0]
        command = re.sub(r"\s+", " ", without_comment).strip()
        commands.append(_shorter(command))
    return "\n".join(commands)


def _shorter(command: str) -> str:
    kind = re.search(r"benchmark\.py (?:layouts )?(\w+)", command)
    if kind:
        more = SHORTER[kind[1]]
        return f"{_without(command, more)} {more}"
    if re.search(r"train\w*\.py", command):
        return f"{command} {_without(SHORTER['train'], command)}"
    return command


def _without(words: str, others: str) -> str:
    """Words without those options, and their values, that others have too."""
    options = re.findall(r"--\w+", others)
    if not options:
        return words
    given = rf" ?(?:{'|'.join(options)})\b(?:[ =](?!--)\S+)*"
    return re.sub(given, "", f" {words}").strip()


def _links(text: str) -> str:
    """Text whose links lead from notebooks/ to where those of docs/ lead."""

    def moved(found: re.Match[str]) -> str:
        target = found[0]
        is_elsewhere = re.match(r"\w+:|#", target)  # an address, or a heading of the same page
        return target if is_elsewhere else os.path.relpath(f"docs/{target}", "notebooks")

    return re.sub(r"(?<=\]\()[^)\s]+(?=\))", moved, text).strip()


def main() -> None:
    """Write the notebooks."""
    FOLDER.mkdir(exist_ok=True)
    for lesson in LESSONS:
        nbformat.write(notebook(lesson), FOLDER / f"{lesson}.ipynb")


if __name__ == "__main__":
    main()
