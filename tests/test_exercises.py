"""Exercises: solutions pass, unsolved and wrong files fail with a line that helps, and nothing hangs."""

import importlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from exercises.check import check_file, exercises, main, title
from tests.support import launch, programs
from tests.support.marks import slow_but
from tests.support.wrong_answers import WRONG

FILES = {file.stem: file for file in exercises().values()}
SEED = 3
WITHOUT_NUMBERS = ("12_choose_a_layout", "16_broken_runs")  # their checks draw nothing
# name: what the unsolved file is told
UNSOLVED = {
    "01_prefetch": "no read had begun: the next step will wait",
    "02_ring_all_reduce": "`reduce_scatter` is not filled in yet",
    "03_gradient_buckets": "it is the sum: was it divided by the ranks",
    "04_sharded_sampler": "do the ranks shuffle alike",
    "05_zero1": "keeps the moments of all",
    "06_tensor_parallel_mlp": "it is this rank's summand",
    "07_merge_attention": "plain mean of the two",
    "08_halo_exchange": "`forward` is not filled in yet",
    "09_rule_for_shard_tensor": "mean of the ranks' means",
    "10_read_a_trace": "`exposed` is not filled in yet",
    "11_reshard": "norm.weight of rank 0: it is .* whole on every rank",
    "13_steps_without_activations": "kept .* times what one step needs",
    "12_choose_a_layout": "few samples: .* 4 cannot be shared by 16 ranks",
    "14_patches": "token 0 is not the patch at its place",
    "15_collectives": "every rank has what rank 0 had",
    "17_fair_crps": "the second term is missing",
    "16_broken_runs": r"^tensor, ranks: no answer(\n.*: no answer){8}$",
}


def solution(name):
    return FILES[name].parent / "solutions" / FILES[name].name


def outside_of_gaps(text):
    """The lines but for those between `# TODO` and `# END`, and how many such gaps there are."""
    lines, gaps, inside = [], 0, False
    for line in text.splitlines():
        inside = inside and line.strip() != "# END"
        if not inside:
            lines.append(line)
        if line.strip().startswith("# TODO"):
            inside, gaps = True, gaps + 1
    assert not inside
    return lines, gaps


PLANNED = pytest.mark.slow("layouts for which the planner traces every model of the exercise")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[PLANNED] * name.startswith("12")) for name in FILES])
def test_a_solution_passes(name):
    assert check_file(name, solution(name), SEED) == []


# Of ranks, of ShardTensor, of one process, and one of answers alone.
QUICK = ["03_gradient_buckets", "09_rule_for_shard_tensor", "14_patches", "16_broken_runs"]


@pytest.mark.parametrize("name", slow_but(QUICK, FILES, "what every other file says before it is filled in"))
def test_an_unsolved_file_fails_with_a_line_that_helps(name):
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", FILES[name]], cwd=FILES[name].parent).returncode == 1:
        pytest.skip("somebody has worked on it")
    lines = check_file(name, FILES[name], SEED)
    assert lines and re.search(UNSOLVED[name], lines[0])
    assert "Traceback" not in "".join(lines)


OTHER_ANSWERS = pytest.mark.slow("the second typical wrong answer to an exercise, and those after it")
NAMES = [name for name, *_ in WRONG]
FIRST = [NAMES.index(name) for name in FILES if not name.startswith("12")]  # the planner traces for that


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [pytest.param(*w, marks=[] if i in FIRST else [OTHER_ANSWERS], id=f"{w[0]}-{i}") for i, w in enumerate(WRONG)],
)
def test_a_wrong_solution_is_told_what_is_wrong(name, old, new, message, tmp_path):
    lines = check_file(name, wrong_file(name, old, new, tmp_path), SEED)
    assert lines and re.search(message, lines[0])


@pytest.mark.nightly
@pytest.mark.slow("each wrong answer is checked over 20 drawn sets of numbers")
@pytest.mark.parametrize("name", [name for name in FILES if name not in WITHOUT_NUMBERS])
def test_wrong_answers_are_refused_whatever_is_drawn(name, tmp_path):
    answers = [each for each in WRONG if each[0] == name]
    assert len(answers) >= 3
    accepted = []
    for _, old, new, _ in answers:
        file = wrong_file(name, old, new, tmp_path)
        accepted += [(new, seed) for seed in range(20) if not check_file(name, file, seed)]
    assert accepted == []


def test_every_exercise_has_typical_wrong_answers():
    counted = Counter(name for name, *_ in WRONG)
    assert set(counted) == set(FILES) and min(counted.values()) >= 3


def wrong_file(name, old, new, folder):
    """The solution with a piece of it replaced, where it comes last."""
    text = solution(name).read_text()
    assert old in text
    file = folder / "mine.py"
    file.write_text(new.join(text.rsplit(old, 1)))
    return file


def test_a_rank_that_waits_is_ended_and_says_where(tmp_path):
    file = tmp_path / "mine.py"
    text = solution("07_merge_attention").read_text()
    file.write_text(
        text.replace("    return out\n", "    if rank == 1:\n        dist.recv(q.contiguous(), 0)\n    return out\n")
    )
    (line,) = check_file("07_merge_attention", file, SEED, patience=2)
    assert re.search(
        r"rank 1: still waiting after 2 s in line \d+, in ring_attention:\n +dist.recv\(q.contiguous", line
    )
    file.write_text(text.replace("    # TODO", "    while True:\n        out = out + 0\n    # TODO"))
    (line,) = check_file("07_merge_attention", file, SEED, patience=1)
    assert "every rank: still waiting after 1 s in line" in line and "in merge" in line


def test_an_error_of_the_learner_names_the_line(tmp_path):
    file = tmp_path / "mine.py"
    text = solution("03_gradient_buckets").read_text()
    file.write_text(text.replace("torch.cat(", "torch.kat("))
    number = text[: text.index("torch.cat(")].count("\n") + 1
    (line,) = check_file("03_gradient_buckets", file, SEED)
    assert f"every rank: line {number}, in average_gradients: AttributeError" in line
    file.write_text(text.replace("for bucket in buckets:", "for bucket in buckets"))
    (line,) = check_file("03_gradient_buckets", file, SEED)
    assert "SyntaxError: expected ':'" in line
    for text, said in (
        ("# later\n", "the file is empty"),
        ("import os\nos._exit(0)\n", "with 2 ranks: every rank: it has ended itself with status 0"),
        ("x = 1\n", "the file has no `average_gradients`"),
    ):
        file.write_text(text)
        assert said in check_file("03_gradient_buckets", file, SEED)[0]


@PLANNED
def test_all_questions_are_answered_at_once():
    (lines,) = check_file("12_choose_a_layout", FILES["12_choose_a_layout"], SEED)
    assert [line.split(":")[0] for line in lines.split("\n  - ")] == ["few samples", "very wide", "wide"]


@pytest.mark.slow("nine broken runs, each trained beside a right one")
def test_the_broken_runs_show_what_is_to_be_answered():
    """Of each run: the ranks of the first stage's first row above the tolerance, and its name, are the answers."""
    answers = importlib.import_module("exercises.checks.16_broken_runs").RIGHT
    run = programs.run(["-m", "exercises.16_broken_runs"])
    assert run.returncode == 0, run.stderr
    assert list(answers) == re.findall(r"^(\w+): \w+$", run.stdout, re.M)
    for (name, answer), tables in zip(
        answers.items(), re.split(r"^\w+: \w+$", run.stdout, flags=re.M)[1:], strict=True
    ):
        stages, modules = tables.strip().split("\n\n")[:2]
        stage, *_ = differing(stages)[0]
        assert modules.startswith(f"| {stage}, in order "), name
        first, *ranks = differing(modules)[0]
        everything = len(differing(modules)) == modules.count("\n") - 1
        assert answer["where"] == ("all" if everything else first)
        assert answer["ranks"] == [rank for rank, error in enumerate(ranks) if error > 1e-8]


def differing(table):
    """[(name, error of rank 0, error of rank 1)] of the rows of a table that differ from one device."""
    rows = [line.strip("| ").split("|") for line in table.splitlines()[2:]]
    rows = [(name.strip(), float(a), float(b)) for name, a, b in rows]
    return [row for row in rows if max(row[1:]) > 1e-8]


@pytest.mark.parametrize("name", FILES)
def test_a_solution_differs_in_the_gap_alone(name):
    (exercise, gaps), (solved, same_gaps) = (outside_of_gaps(p.read_text()) for p in (FILES[name], solution(name)))
    assert gaps == same_gaps >= 1
    assert exercise == solved
    assert FILES[name].read_text() != solution(name).read_text()


@pytest.mark.parametrize("name", FILES)
def test_an_exercise_is_short_and_names_files_that_are_there(name):
    text = FILES[name].read_text()
    assert text.count("\n") <= 90
    named = re.findall(r"\b((?:utils|distributed|docs|config)/[\w/]+\.\w+)", text)
    assert any(path.startswith("docs/") for path in named)
    for path in named:
        assert Path(path).is_file(), path
    for path, section in re.findall(r'(docs/\w+\.md),\s"([^"]+)"', text):
        assert re.search(rf"^#+ {re.escape(' '.join(section.split()))}", Path(path).read_text(), re.MULTILINE), section


def test_the_readme_lists_every_exercise():
    table = Path("exercises/README.md").read_text()
    for number, file in exercises().items():
        assert re.search(rf"^\| {number} \| \[.*\]\({file.name}\)", table, re.MULTILINE), file
    for link in re.findall(r"\]\(([^)#:]+)", table):
        assert Path("exercises", link).exists(), link


def test_the_list_has_a_line_for_each(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    for file in FILES.values():
        assert title(file)[1] in printed


def test_the_command_ends_with_a_status():
    for words, status, text in (
        (["4"], 1, "which rank trains on which sample: not yet. exercises/04_sharded_sampler.py (seed "),
        (["4", "--solution"], 0, "right."),
        (["99"], 2, f"error: argument number: 99 is not within 1 to {len(FILES)}"),
    ):
        run = programs.run(["-m", "exercises.check", *words])
        assert run.returncode == status, run.stderr
        assert text in run.stdout + run.stderr and "Traceback" not in run.stdout + run.stderr


def test_make_uses_the_environment_that_is_active_and_builds_none(tmp_path):
    shutil.copy("Makefile", tmp_path)
    (tmp_path / "requirements.txt").touch()
    for words, wanted in (
        (["exercise", "N=3", "SOLUTION=1"], "-m exercises.check 3 --solution"),
        (["preflight", "RANKS=2"], "-m torch.distributed.run --nproc_per_node 2 -m tools.preflight"),
    ):
        active = {**launch.without_make(), "VIRTUAL_ENV": sys.prefix}
        run = subprocess.run(["make", "-n", *words], cwd=tmp_path, env=active, capture_output=True, text=True)
        assert run.stdout.split() == [f"{sys.prefix}/bin/python", *wanted.split()]
    # Without torch an environment is built first.
    none = {**active, "VIRTUAL_ENV": "", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(["make", "-n", *words, "PYTHON=false"], cwd=tmp_path, env=none, capture_output=True, text=True)
    assert "-m venv" in run.stdout and run.stdout.split()[-1] == "tools.preflight"
