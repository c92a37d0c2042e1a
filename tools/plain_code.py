"""Hold the code to what is read at first sight: python -m tools.plain_code, a part of `make lint`.

A statement has few tokens and is not nested deeply, a comprehension holds no other one, a call's arguments hold no
condition, and a function fits on a page. Averages over all of the code, and its share of comments, are held as well.
What is left out of a rule stands in EXEMPT with its reason. Exit status 1 names each place that breaks a rule.
"""

import ast
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Code of the product alone is held to the rules; tests, pages and exercises are not.
FOLDERS = ("networks", "weather", "utils", "distributed", "training", "tools")
SCRIPTS = ("train.py", "train_mp.py", "train_shard.py", "forecast.py", "plan.py", "benchmark.py")

MOST_TOKENS = 45  # of a statement; of a table, of each row
MOST_NESTING = 5  # of calls, subscripts and operators in one another
MOST_LINES = 60  # of a function

# Limits of the means over all code: (the most, or the least for comments).
MOST_TOKENS_A_LINE = 9.0
MOST_TOKENS_A_STATEMENT = 11.0
MOST_MEAN_NESTING = 1.35
LEAST_COMMENTS = 70  # of 1,000 lines

# {"file: name of the function, or of what a module's statement assigns": reason}
EXEMPT: Mapping[str, str] = {}

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # tokens that are no code
# Expressions that a reader has to take apart; names, attributes and tuples are read at once.
NESTS = (
    ast.Call,
    ast.Subscript,
    ast.BinOp,
    ast.Compare,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.IfExp,
    ast.Lambda,
    ast.NamedExpr,
    ast.BoolOp,
    ast.Starred,
    ast.JoinedStr,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Statements that are read by their parts.
COMPOUND = (*FUNCTIONS, ast.ClassDef, ast.Try, ast.With, ast.Import, ast.ImportFrom)


@dataclass
class Measures:
    """What is counted over files."""

    lines: int = 0
    comments: int = 0
    code_tokens: list[int] = field(default_factory=list)  # of each line of code
    statement_tokens: list[int] = field(default_factory=list)
    nesting: list[int] = field(default_factory=list)  # of each statement


@dataclass
class Source:
    """A file as it is parsed, with its tokens of code by line."""

    path: Path
    tree: ast.Module
    starts: dict[int, list[int]]  # {line: column of each token}
    comments: int
    lines: int


def main() -> int:
    """Print what breaks a rule; 0 if nothing does."""
    measures = Measures()
    problems: list[str] = []
    for path in product_files():
        # Each file is parsed once, for the rules and for the means.
        source = read_source(path)
        problems += problems_of(source)
        add_measures(measures, source)
    problems += problems_of_means(measures)
    for line in problems:
        print(line)
    return 1 if problems else 0


def product_files() -> Iterator[Path]:
    """The files of the product: its packages, and its scripts."""
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))
    for script in SCRIPTS:
        yield ROOT / script


def read_source(path: Path) -> Source:
    """Parse a file."""
    text = path.read_text()
    tree = ast.parse(text)
    documentation = lines_of_docstrings(tree)
    starts: dict[int, list[int]] = {}
    comments = 0
    for token in tokenize.generate_tokens(StringIO(text).readline):
        line, column = token.start
        # A docstring is prose, so its tokens do not count as code.
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.type not in LAYOUT and line not in documentation:
            starts.setdefault(line, []).append(column)
    return Source(path, tree, starts, comments, text.count("\n"))


def lines_of_docstrings(tree: ast.Module) -> set[int]:
    """The numbers of the lines on which strings stand that are no part of an expression."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if is_text(node):
            first, last = lines_of(node)
            found.update(range(first, last + 1))
    return found


def lines_of(node: ast.AST) -> tuple[int, int]:
    """The numbers of a node's first and last line."""
    place: Any = node  # statements and expressions alone have a place
    return place.lineno, place.end_lineno


def is_text(node: ast.AST) -> bool:
    """Tell whether a statement is a string alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def problems_of(source: Source) -> Iterator[str]:
    """A line for each place of a file that breaks a rule."""
    path = source.path.relative_to(ROOT)
    for owner, node in with_owners(source.tree):
        # An exemption covers a whole function or assignment, since a line number would soon be wrong.
        if f"{path}: {owner}" in EXEMPT:
            continue
        for what in broken_rules(node, source):
            yield f"{path}:{node.lineno}: {owner}: {what}"


def with_owners(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Each statement, with the name of the function or class that holds it, or of what it assigns in a module."""
    for top in tree.body:
        owner = name_of(top)
        for node in ast.walk(top):
            if isinstance(node, ast.stmt):
                yield owner, node


def name_of(node: ast.stmt) -> str:
    """The name that a statement of a module defines."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    return "module"


def broken_rules(node: ast.stmt, source: Source) -> Iterator[str]:
    """What is wrong with a statement."""
    if isinstance(node, FUNCTIONS):
        first, last = lines_of(node)
        length = last - first + 1
        if length > MOST_LINES:
            yield f"a function of {length} lines: name its stages ({MOST_LINES} at most)"
    # A definition has no part that is read at once: its own statements come by themselves.
    part = part_read_at_once(node)
    if part is None:
        return
    count = tokens_read_at_once(part, source)
    if count > MOST_TOKENS:
        yield f"{count} tokens in a statement: name intermediate values ({MOST_TOKENS} at most)"
    depth = nesting_of(part)
    if depth > MOST_NESTING:
        yield f"{depth} expressions in one another: name the inner ones ({MOST_NESTING} at most)"
    if has_nested_comprehension(part):
        yield "a comprehension within a comprehension: write a loop"
    if has_condition_in_call(part):
        yield "a condition within a call: name its value first"


def part_read_at_once(node: ast.stmt) -> ast.AST | None:
    """The statement, or of one that holds others the expression in front of them; None for a definition."""
    if isinstance(node, COMPOUND) or is_text(node):
        return None
    if isinstance(node, (ast.If, ast.While)):
        return node.test
    if isinstance(node, ast.For):
        return node.iter
    return node


def tokens_in(node: ast.AST, source: Source) -> int:
    """The number of tokens of code between a node's first and last character."""
    place: Any = node
    first = (place.lineno, place.col_offset)
    last = (place.end_lineno, place.end_col_offset)
    count = 0
    for line in range(place.lineno, place.end_lineno + 1):
        columns = source.starts.get(line, ())
        count += sum(first <= (line, column) < last for column in columns)
    return count


def tokens_read_at_once(node: ast.AST, source: Source) -> int:
    """The tokens of a node; of a table, which is read row by row, only those of its longest row."""
    count = tokens_in(node, source)
    for table in tables_in(node):
        rows = []
        for row in rows_of(table):
            tokens = [tokens_in(part, source) for part in row]
            rows.append(sum(tokens))
        # The table counts as its longest row.
        count += max(rows) - tokens_in(table, source)
    return count


def tables_in(node: ast.AST) -> Iterator[ast.AST]:
    """The outermost displays of dicts, lists, tuples and sets, and calls, that have a row on each of several lines."""
    rows = rows_of(node)
    lines = {lines_of(row[0])[0] for row in rows}
    # Entries that all begin on lines of their own make a table.
    if len(rows) > 1 and len(lines) == len(rows):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from tables_in(child)


def rows_of(node: ast.AST) -> list[list[ast.AST]]:
    """The entries of a display, or the arguments of a call: the expressions of each."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [[value] if key is None else [key, value] for key, value in pairs]  # **mapping has no key
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [[entry] for entry in node.elts]
    if isinstance(node, ast.Call):
        keyword_values = [keyword.value for keyword in node.keywords]
        return [[argument] for argument in [*node.args, *keyword_values]]
    return []


def nesting_of(node: ast.AST) -> int:
    """How many calls, subscripts and operators stand in one another at most."""
    below = max((nesting_of(child) for child in ast.iter_child_nodes(node)), default=0)
    return below + isinstance(node, NESTS)


def has_nested_comprehension(node: ast.AST) -> bool:
    """Tell whether a comprehension stands anywhere within another one."""
    for child in ast.walk(node):
        if not isinstance(child, COMPREHENSIONS):
            continue
        below = list(ast.walk(child))[1:]  # without the child itself, which comes first
        if any(isinstance(other, COMPREHENSIONS) for other in below):
            return True
    return False


def has_condition_in_call(node: ast.AST) -> bool:
    """Tell whether an argument of a call is an `a if b else c`, and the condition b has no name."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            values = [*call.args, *[keyword.value for keyword in call.keywords]]
            conditions = [value.test for value in values if isinstance(value, ast.IfExp)]
            if not all(isinstance(condition, (ast.Name, ast.Attribute)) for condition in conditions):
                return True
    return False


def add_measures(measures: Measures, source: Source) -> None:
    """Count a file's lines, comments, tokens and nesting."""
    measures.lines += source.lines
    measures.comments += source.comments
    measures.code_tokens += [len(columns) for columns in source.starts.values()]
    for node in ast.walk(source.tree):
        part = part_read_at_once(node) if isinstance(node, ast.stmt) else None
        if part is not None:
            measures.statement_tokens.append(tokens_in(part, source))
            measures.nesting.append(nesting_of(part))


def problems_of_means(measures: Measures) -> Iterator[str]:
    """A line for each mean over all code that is out of its limit."""
    # Each figure is (name, mean, the most that it may be).
    figures = [
        ("tokens a line of code", mean(measures.code_tokens), MOST_TOKENS_A_LINE),
        ("tokens a statement", mean(measures.statement_tokens), MOST_TOKENS_A_STATEMENT),
        ("mean nesting of a statement", mean(measures.nesting), MOST_MEAN_NESTING),
    ]
    for name, figure, most in figures:
        if figure > most:
            yield f"all code: {name}: {figure:.2f}, {most} at most"
    # Comments have a lower limit, all other figures an upper one.
    comments = 1000 * measures.comments / measures.lines
    if comments < LEAST_COMMENTS:
        yield f"all code: {comments:.0f} comments in 1,000 lines, {LEAST_COMMENTS} at least"


def mean(values: Iterable[int]) -> float:
    """The arithmetic mean."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    sys.exit(main())
