"""The checker of plain code finds what it is there for, and passes over what is plain."""

import pytest

from tools import plain_code

LONG_SUM = " + ".join(f"x{i}" for i in range(30))
NESTED = "f(g(h(i(j(k(1))))))"

BROKEN = {
    "long statement": (f"y = {LONG_SUM}\n", "tokens in a statement"),
    "nesting": (f"y = {NESTED}\n", "6 expressions in one another"),
    "comprehension": ("y = [[a for a in b] for b in c]\n", "a comprehension within a comprehension"),
    "condition": ("f(1 if a > b else 2)\n", "a condition within a call"),
    "keyword": ("f(x=1 if a > b else 2)\n", "a condition within a call"),
    "condition of a loop": (f"while {NESTED}:\n    pass\n", "6 expressions in one another"),
    "function": ("def f():\n" + "    x = 1\n" * 60, "a function of 61 lines"),
    "table": ("y = {\n" + f"    1: 2,\n    2: {LONG_SUM},\n" + "}\n", "tokens in a statement"),
}
PLAIN = {
    "sum": "y = a + b * c\n",
    "named condition": "f(1 if is_first else 2)\n",
    "comprehension": "y = [a for a in b if a > 1]\n",
    "rows": "y = {\n" + "".join(f"    {i}: f(a, b),\n" for i in range(40)) + "}\n",
    "arguments": "f(\n" + "".join(f"    x{i}=g(a, b),\n" for i in range(40)) + ")\n",
    "function": "def f():\n" + "    x = 1\n" * 59,
    "docstring": '"""' + "word " * 100 + '"""\n',
}


def problems(tmp_path, monkeypatch, text):
    monkeypatch.setattr(plain_code, "ROOT", tmp_path)
    file = tmp_path / "code.py"
    file.write_text(text)
    return list(plain_code.problems_of(plain_code.read_source(file)))


@pytest.mark.parametrize(("text", "line"), BROKEN.values(), ids=BROKEN)
def test_what_is_dense_is_named_with_its_place(tmp_path, monkeypatch, text, line):
    found = problems(tmp_path, monkeypatch, text)
    assert found and all(problem.startswith("code.py:") for problem in found)
    assert any(line in problem for problem in found)


@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
def test_what_is_plain_passes(tmp_path, monkeypatch, text):
    assert problems(tmp_path, monkeypatch, text) == []


def test_an_exemption_holds_for_its_function_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_code, "EXEMPT", {"code.py: f": "a reason"})
    text = f"def f():\n    return {NESTED}\n\n\ndef g():\n    return {NESTED}\n"
    (problem,) = problems(tmp_path, monkeypatch, text)
    assert problem.startswith("code.py:6: g: ")


def test_means_of_all_code_are_held():
    sparse = plain_code.Measures(lines=1000, comments=10, code_tokens=[8], statement_tokens=[8], nesting=[1])
    (line,) = plain_code.problems_of_means(sparse)
    assert line.startswith("all code: 10 comments in 1,000 lines")
    dense = plain_code.Measures(lines=10, comments=10, code_tokens=[12], statement_tokens=[14], nesting=[2])
    assert len(list(plain_code.problems_of_means(dense))) == 3


@pytest.mark.nightly
@pytest.mark.slow("`make lint` says the same in its own words")
def test_the_tree_is_plain(capsys):
    assert plain_code.main() == 0, capsys.readouterr().out
