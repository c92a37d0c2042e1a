"""A program imports torch's sharding only where it needs it: that takes longer than all that is said before."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import train
try:
    train.main([{word!r}, "--config=short"])
except (SystemExit, Exception) as end:
    print(type(end).__name__)
print([name for name in {modules} if name in sys.modules])
"""
MODULES = [f"torch.distributed.{name}" for name in ("tensor", "fsdp", "checkpoint", "optim", "pipelining")]


@pytest.mark.parametrize(("word", "end"), [("--help", "SystemExit"), ("--embed_dim=-1", "UsageError")],
                         ids=["help", "refusal"])  # fmt: skip
def test_help_and_a_refusal_import_no_sharding(word, end):
    """What comes later has it anyway: torch 2.13 imports it with torch._dynamo, in the first call of a model."""
    program = PROGRAM.format(word=word, modules=MODULES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [end, "[]"]


def test_help_of_other_programs_imports_neither_sharding_nor_the_compiler():
    """train_shard.py alone needs them at once."""
    program = """
import importlib
import sys
for name in ("train_mp", "forecast", "plan", "benchmark"):
    try:
        importlib.import_module(name).main(["--help"])
    except SystemExit as end:
        assert not end.code
print([name for name in {modules} if name in sys.modules])
"""
    modules = [*MODULES, "torch._dynamo"]
    words = [sys.executable, "-c", program.replace("{modules}", str(modules))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
