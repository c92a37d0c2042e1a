"""What docs/domain_parallel.md shows is what the files say, and its examples run."""

import re
from pathlib import Path

import torch

from docs.examples import domain_messages, own_model
from docs.examples.own_rule import CASES
from tests.shard_parity import check_all
from utils import comm

CHAPTER = Path("docs/domain_parallel.md").read_text()


def lines_of(text):
    """Without indentation, comments and blank lines."""
    return [code for line in text.splitlines() if (code := line.partition("  #")[0].strip())]


def code_of(path):
    return lines_of(Path(path).read_text())


def is_part(block, lines):
    block = lines_of(block)
    return any(lines[i : i + len(block)] == block for i in range(len(lines)))


def test_the_snippets_are_those_of_the_examples():
    blocks = re.findall(r"```python\n(.*?)```", CHAPTER, re.DOTALL)
    for path, words in (
        ("docs/examples/own_model.py", "scatter_tensor("),
        ("docs/examples/own_rule.py", "@rule(torch.fft.rfft)"),
        ("docs/examples/own_rule.py", "CASES ="),
        ("distributed/domain_parallel.py", "def forward_part"),
    ):
        (block,) = (block for block in blocks if words in block)
        assert is_part(block, code_of(path)), path


def test_the_printed_difference_is_that_of_the_scripts():
    (shown,) = re.findall(r"```diff\n(.*?)```", CHAPTER, re.DOTALL)
    before, after = code_of("train_mp.py"), code_of("train_shard.py")
    for line in filter(None, shown.splitlines()):
        with_it, without = (before, after) if line[0] == "-" else (after, before)
        assert line[1:].strip() in with_it and line[1:].strip() not in without, line


def test_files_that_the_chapter_links_are_there():
    for link in re.findall(r"\]\(([^)#:]+)\)", CHAPTER):
        assert (Path("docs") / link).exists(), link


def test_the_rule_of_the_chapter_gives_the_numbers_of_the_whole(ranks):
    ranks(2, check_all, list(CASES.values()))


def test_the_model_of_the_chapter_runs(ranks):
    ranks(2, own_model.train_step)


def counted(config):
    comm.build_mesh(torch.device("cpu"), config.layout(comm.world_size()))
    return [domain_messages.in_words(phase) for phase in domain_messages.messages_of_a_step(config)]


def test_messages_are_counted_as_the_chapter_says(ranks, tiny_config):
    sizes = {"embed_dim": 128, "depth": 4, "num_heads": 4, "img_size": [32, 64], "global_batch_size": 16}
    config = tiny_config(**sizes, domain_parallel=2)
    forward, backward = ranks(2, counted, config)[0]
    assert forward == "4 all_gather of 4,194,304 bytes, 1 all_reduce of 128 bytes"
    assert backward == "1 all_reduce of 3,502,848 bytes, 4 reduce_scatter of 4,194,304 bytes"
    for number in re.findall(r"[\d,]{7,}", forward + backward):
        assert number in CHAPTER
