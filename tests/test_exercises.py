"""Exercises: solutions pass, unsolved and wrong files fail with a line that helps, and nothing hangs."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from exercises.check import check_file, exercises, main, title
from tests.support import programs

FILES = {file.stem: file for file in exercises().values()}
SEED = 3
# name: what the unsolved file is told
UNSOLVED = {
    "01_prefetch": "no read had begun: the next step will wait",
    "02_ring_all_reduce": "`ring_all_reduce` is not filled in yet",
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
    "16_broken_runs": r"^tensor, ranks: no answer(\n.*: no answer){8}$",
}
VERY_WIDE = '"very wide": "--tensor_parallel=4 --data_parallel=zero2 --sequence_parallel"'
# (name, a piece of the solution, what stands there instead, what the check says to it)
WRONG = [
    ("13_steps_without_activations", "own + later", "own", "comes back from the step after"),
    ("13_steps_without_activations", "/ count", "", "the loss is .*, should be"),
    ("13_steps_without_activations", "with torch.no_grad():", "if True:", "is a step's graph gone before"),
    ("01_prefetch", "range(min(depth, count))", "range(count)", "depth is 1: the memory for them"),
    ("01_prefetch", "coming.pop(0)", "coming.pop()", "batches must come in order"),
    ("01_prefetch", "coming.pop(0).result()", "(coming.pop(0).exception(), read(i))[1]", "in the caller's thread"),
    ("02_ring_all_reduce", "(size - 1):\n        whole", "(0):\n        whole", "do the whole sums go round"),
    (
        "02_ring_all_reduce",
        "    for step in range(size - 1):\n        own",
        "    y, chunks = x, [x.clone()]\n    for _ in range(size - 1):\n        y = shift(y)\n        chunks[0] += y\n"
        "    return chunks[0]\n    for step in range(size - 1):\n        own",
        "3 ranks.* one chunk passed on in a step, or all of them",
    ),
    (
        "03_gradient_buckets",
        "get_world_size()",
        "get_world_size() ** 2",
        "half of what it should be: was the mean taken twice",
    ),
    ("03_gradient_buckets", "reversed(parameters)", "parameters", "last"),
    ("03_gradient_buckets", "grad.copy_(part.view_as(grad))", "part.view_as(grad)", "was the bucket copied back"),
    ("03_gradient_buckets", "buckets[-1] and size + p.grad.nbytes > limit", "buckets[-1]", "one per parameter"),
    ("04_sharded_sampler", "order[rank::size]", "order[rank::size][: length // size]", "was the rest forgotten"),
    ("04_sharded_sampler", "[rank::size][done:]", "[done:][rank::size]", "leave out the first samples of the rank"),
    ("04_sharded_sampler", "torch.Generator()", "torch.default_generator", "default generator is not as it was"),
    ("04_sharded_sampler", " + epoch", "", "the next epoch has the same order"),
    ("05_zero1", "dist.broadcast(p, owner)", "pass", "did its owner, rank ., send it"),
    ("05_zero1", "held[owner] += p.numel()", "held[owner] += 1", "least so far|by the rule"),
    ("06_tensor_parallel_mlp", "return summed(grad)", "return grad", "gradient of x .* f adds up"),
    ("06_tensor_parallel_mlp", "F.linear(h, w2)) + b2", "F.linear(h, w2, b2))", "b2 was added 2 times"),
    (
        "06_tensor_parallel_mlp",
        "        return grad\n",
        "        return summed(grad)\n",
        "2 times what it should be: g has added",
    ),
    (
        "07_merge_attention",
        "total.masked_fill(total == -torch.inf, 0)",
        "total",
        "in any block .* -inf - .-inf. is nan",
    ),
    (
        "07_merge_attention",
        "(lse - top).exp(), (block_lse - top).exp()",
        "lse.exp() / total.exp(), block_lse.exp() / total.exp()",
        "in the hundreds .* off the larger lse first",
    ),
    ("08_halo_exchange", "return own, None", "return grad[:, r:-r], None", "the halo's gradient was dropped"),
    ("08_halo_exchange", "own[:, -r:] += below", "own[:, -r:] = below", "to be added to what is there"),
    ("08_halo_exchange", "(x[:, :r], x[:, -r:])", "(x[:, -r:], x[:, :r])", "which rows does the neighbour need"),
    ("09_rule_for_shard_tensor", "(~part.isnan()).sum()", "torch.tensor(part.numel())", "the gaps were counted"),
    (
        "09_rule_for_shard_tensor",
        "reduce_from_region(torch.stack((part.nansum(), count)), everyone)",
        "reduce_from_region(part.nansum(), everyone), reduce_from_region(count, everyone)",
        "2 messages: sum and count fit into one",
    ),
    (
        "10_read_a_trace",
        "return alone + max(0, end - reached)",
        "return end - start - sum(max(0, min(e, end) - max(b, start)) for _, b, e in compute)",
        "the time counts once",
    ),
    ("10_read_a_trace", "return 1 - alone", "return alone", "that is the exposed share"),
    ("10_read_a_trace", "+ exposed(start, end, compute)", "+ end - start", "part of it is hidden"),
    ("11_reshard", "fromkeys(columns, 1)", "fromkeys(columns, 0)", "proj.weight of rank 0: .* split along dim 1"),
    ("11_reshard", "(heads, 3, -1)", "(3, heads, -1)", "this is the way back"),
    ("14_patches", "(0, 2, 4, 1, 3, 5)", "(0, 2, 4, 3, 5, 1)", "in another order: channels first"),
    ("14_patches", "(0, 3, 1, 4, 2, 5)", "(0, 3, 1, 4, 5, 2)", "the image has the shape|is not the image"),
    ("14_patches", "(3 + 1 + 4 + 4)", "(3 + 4 + 4)", "weights in its four matrices"),
    ("15_collectives", "return [before[0] for", "return [before[1] for", "every rank has what rank 0 had"),
    ("15_collectives", "[r * n : (r + 1) * n]] for r", "[:n]] for r", "rank r has piece r of every rank's list"),
    ("15_collectives", "2 * share if", "share if", "in all_reduce of .* sends"),
    ("16_broken_runs", "[0],", "[0, 1],", "^domain, ranks: rank 1 is equal in the row where the difference begins$"),
    ("16_broken_runs", "[0, 1],", "[1],", "^tensor, ranks: rank 0 differs too in the row where"),
    ("16_broken_runs", "mlp.fc2", "mlp", "^tensor, where: a part of blocks.1.mlp differs before it$"),
    ("16_broken_runs", '"all"', '"norm.bias"', "^data, where: it is not the only row of this stage that differs"),
    ("16_broken_runs", "learning rate", "moments", "^data, cause: then the weights after step 1 would be equal$"),
    ("16_broken_runs", '"halo"', '"norm"', "^domain, cause: then an output would differ, first that of a norm$"),
    (
        "12_choose_a_layout",
        VERY_WIDE,
        '"very wide": "--data_parallel=zero1"',
        "very wide: it needs .* which strategy shares them out",
    ),
    (
        "12_choose_a_layout",
        VERY_WIDE,
        '"very wide": "--data_parallel=fsdp --activation_checkpointing=full"',
        "computes activations twice",
    ),
]


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


@pytest.mark.parametrize("name", FILES)
def test_an_unsolved_file_fails_with_a_line_that_helps(name):
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", FILES[name]], cwd=FILES[name].parent).returncode == 1:
        pytest.skip("somebody has worked on it")
    lines = check_file(name, FILES[name], SEED)
    assert lines and re.search(UNSOLVED[name], lines[0])
    assert "Traceback" not in "".join(lines)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [pytest.param(*w, marks=[PLANNED] * w[0].startswith("12"), id=f"{w[0]}-{i}") for i, w in enumerate(WRONG)],
)
def test_a_wrong_solution_is_told_what_is_wrong(name, old, new, message, tmp_path):
    text = solution(name).read_text()
    assert old in text
    file = tmp_path / "mine.py"
    file.write_text(new.join(text.rsplit(old, 1)))
    lines = check_file(name, file, SEED)
    assert lines and re.search(message, lines[0])


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


@PLANNED
def test_all_questions_are_answered_at_once():
    (lines,) = check_file("12_choose_a_layout", FILES["12_choose_a_layout"], SEED)
    assert [line.split(":")[0] for line in lines.split("\n  - ")] == ["few samples", "very wide", "wide"]


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
        (["17"], 2, "error: argument number: 17 is not within 1 to 16"),
    ):
        run = programs.run(["-m", "exercises.check", *words])
        assert run.returncode == status, run.stderr
        assert text in run.stdout + run.stderr and "Traceback" not in run.stdout + run.stderr


def test_make_passes_its_variables_on():
    run = subprocess.run(["make", "-n", "exercise", "N=3", "SOLUTION=1"], capture_output=True, text=True)
    assert "python -m exercises.check 3 --solution" in run.stdout
