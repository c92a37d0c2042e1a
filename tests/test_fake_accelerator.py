"""The step of every layout runs on an accelerator: nothing is mixed with host tensors, and nothing is read back."""

import re

import pytest

from tests.support import programs
from tests.support.marks import slow_but
from utils.config import SCRIPTS
from utils.yaml_files import read_mappings

ONE = [
    "", "--amp_mode=fp16 --enable_fused --clip_grad_norm=1", "--data_parallel=fsdp --cpu_offload --dropout=0.1",
    "--activation_checkpointing=full", "--activation_checkpointing=selective --amp_mode=bf16 --gradient_accumulation=2",
    "--model=unet", "--model=afno", "--device=gpu",  # without its number, as a user may name it
    "--rollout_steps=3 --forcings hour latitude --ema=0.9 --loss=squared_error --activation_checkpointing=step",
]  # fmt: skip
LAYOUTS = [
    ("train.py", 2, "--data_parallel=ddp"),
    ("train.py", 2, "--data_parallel=ddp --gradient_compression=bf16"),
    ("train.py", 2, "--data_parallel=zero1"),
    ("train.py", 2, "--data_parallel=fsdp --amp_mode=bf16"),
    ("train.py", 2, "--data_parallel=fsdp --cpu_offload --clip_grad_norm=1"),
    ("train.py", 4, "--data_parallel=hsdp"),
    ("train.py", 2, "--model=unet --sync_batchnorm"),
    ("train.py", 2, "--loss=crps --ensemble_size=3 --ensemble_parallel=2 --amp_mode=bf16"),
    ("train.py", 2, "--data_parallel=fsdp --rollout_steps=2 --forcings day --ema=0.9 --amp_mode=bf16"),
    ("train_mp.py", 2, "--tensor_parallel=2"),
    ("train_mp.py", 2, "--context_parallel=2 --rollout_steps=2 --forcings hour day --loss=squared_error"),
    ("train_mp.py", 4, "--tensor_parallel=2 --sequence_parallel --amp_mode=bf16 --clip_grad_norm=1"),
    ("train_mp.py", 2, "--context_parallel=2 --cp_method=gather"),
    ("train_mp.py", 2, "--context_parallel=2 --cp_method=ring"),
    ("train_mp.py", 2, "--context_parallel=2 --cp_method=all_to_all --amp_mode=fp16 --enable_fused"),
    ("train_mp.py", 2, "--pipeline_parallel=2 --gradient_accumulation=2"),
    ("train_mp.py", 4, "--tensor_parallel=2 --data_parallel=fsdp"),
    # A ShardTensor of fake tensors bears a backward pass only through blocks that are recomputed.
    ("train_shard.py", 2, "--domain_parallel=2 --activation_checkpointing=full"),
    ("train_shard.py", 4, "--domain_parallel=2x2 --activation_checkpointing=full --data_parallel=fsdp"),
    ("train_shard.py", 4, "--domain_parallel=2 --tensor_parallel=2 --activation_checkpointing=full"),
]
CONFIGS = {"train.py": "quick", "train_mp.py": "mp_quick", "train_shard.py": "shard_quick"}


def run(script, ranks, options, **environment):
    words = ["-m", "tests.support.fake_accelerator", script, ranks, *options.split()]
    done = programs.run(words, env=environment or None)
    return done.returncode, done.stderr


@pytest.mark.parametrize("options", slow_but([ONE[1], ONE[4]], ONE, "other options of one device"))
def test_one_device(options):
    status, errors = run("train.py", 1, f"--config=quick {options}")
    assert status == 0, errors


# A layout of each script: copied and sharded weights, split layers, a ring, stages, split images.
QUICK = [LAYOUTS[i] for i in (0, 3, 9, 13, 15, 17)]


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "other layouts of each script"), ids=lambda case: case[2])
def test_a_rank_of_a_layout(layout):
    script, ranks, options = layout
    status, errors = run(script, ranks, f"--config={CONFIGS[script]} {options}")
    assert status == 0, errors


def named_configs():
    for name, script in SCRIPTS.items():
        for config in read_mappings(script.yaml_config, "configs"):
            yield pytest.param(name, config, id=config)


@pytest.mark.nightly
@pytest.mark.slow("every config that ships, at its own size")
@pytest.mark.parametrize(("script", "config"), list(named_configs()))
def test_every_named_config(script, config):
    ranks, options = 2, ""
    if script == "train_shard.py":  # the rules cast their inputs, and the autocast that casts weights is not there
        options = "--activation_checkpointing=full --amp_mode=none"
        if "classify" in config:  # its head is a ShardTensor outside of blocks
            ranks = 1
        else:
            options += " --domain_parallel=2"
    status, errors = run(script, ranks, f"--config={config} --no-enable_jit {options}")
    assert status == 0, errors


@pytest.mark.parametrize(
    ("mutant", "line"),
    [
        ("item", "DataDependentOutputException"),
        ("buffer", "at least two devices, gpu:0 and cpu|Unhandled FakeTensor Device Propagation"),
    ],
)
def test_a_mistake_is_found(mutant, line):
    status, errors = run("train.py", 1, "--config=quick", **(programs.os.environ | {"MUTANT": mutant}))
    assert status != 0 and re.search(line, errors)
