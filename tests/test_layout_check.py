"""plan.py check: planted faults are named by stage, module and cause; right layouts and own models are equal."""

import json
import re
from contextlib import nullcontext

import pytest
import torch

import plan
from tests.support.layout_faults import FAULTS, patched
from tests.support.layout_parity import compare_in_double, ranks_and_options, record_in_double
from tests.support.marks import needs_torch, slow_but
from tests.support.refusals import refusal
from tests.support.step_faults import MORE_FAULTS
from tools.instruments.rank_case import words_of_name
from tools.layout_check import check
from tools.layout_check.differences import TOLERANCES, largest_of_stage, scale_of
from tools.layout_check.record import GRADIENT
from tools.layout_check.wide import quick_compilation, wide_casts
from tools.planner.validate import build_cases
from utils import comm
from utils.data_loader import BatchLoader

ALL_FAULTS = FAULTS | MORE_FAULTS
LAYOUTS = [
    "dp4,data_parallel=hsdp,dp_shard=2", "tp2xcp2,sequence_parallel", "pp2xdp2", "domain2xtp2,data_parallel=fsdp",
    "domain2x3",
]  # fmt: skip


def compare_faulty(config, file, fault):
    return compare_in_double(config, file, ALL_FAULTS[fault].plant)


def compare_read(config, file, fault):
    real = BatchLoader.order

    def order(loader, seed=None):
        other = seed is not None and comm.rank() == 3
        return real(loader, seed + 1 if other else seed)

    plant = patched("utils.data_loader.BatchLoader.order", order) if fault else nullcontext
    return compare_in_double(config, file, plant, read_data=True)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Call with a config to get the file of what one device computes, which is done once for all faults."""
    folder, files = tmp_path_factory.mktemp("one-device"), {}

    def file_of(config):
        key = repr(config.model_copy(update={"expdir": ""}))
        if key not in files:
            files[key] = folder / str(len(files)) / "one.pt"
            files[key].parent.mkdir()
            record_in_double(config, files[key])
        return files[key]

    return file_of


FIRST = {name.split(":")[0]: name for name in reversed(FAULTS)}  # of each kind of parallelism


@pytest.mark.parametrize("fault", slow_but(FIRST.values(), ALL_FAULTS, "other faults of the same kinds of parallelism"))
def test_a_planted_fault_is_named(ranks, tiny_config, one_device, fault):
    _, layout, stage, name, cause, shared = ALL_FAULTS[fault]
    size, options = ranks_and_options(layout)
    file = one_device(tiny_config(**shared | {"gradient_accumulation": 1}))
    result = ranks(size, compare_faulty, tiny_config(**shared | options), file, fault)[0]
    assert result.stage == stage, result
    assert re.search(name, result.name) and re.search(cause, result.cause), result


def test_the_help_of_the_check_names_its_other_kind(capsys):
    with pytest.raises(SystemExit):
        check.main(["--help"])
    assert "plan.py check --all --help" in " ".join(capsys.readouterr().out.split())


JOINED = ["--model=tools.compositions.joined:Joined", "--model_args={}", "--enable_jit"]


def test_layouts_are_compiled_where_that_is_asked_for_and_one_device_is_not():
    serial, domain = check.cases_of([*JOINED, "--global_batch_size=2"], ["domain2"])
    assert domain.config.enable_jit and not serial.config.enable_jit


@pytest.mark.slow("compiled blocks that join tensors by a tuple, by the command")
@needs_torch((2, 13), "cannot trace the rules of ShardTensor")
def test_compiled_blocks_that_join_by_tuples_are_equal_to_one_device(capsys):
    words = [
        "check",
        "--config=quick",
        "--device=cpu",
        *JOINED,
        "--global_batch_size=2",
        "--layouts",
        "domain2",
        "domain3",
    ]
    assert plan.main(words) == 0
    table = capsys.readouterr().out
    assert table.count("equal |") == 2 and "not compared: blocks.0.mix" in table


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_part_that_the_model_compiles_as_one_graph_is_compared(capsys):
    """Hooks that record its modules would break the graph, which the model forbids."""
    words = ["check", "--config=quick", "--device=cpu", "--model=tests.support.usage_models:CompiledWhole"]
    assert plan.main([*words, "--sync_batchnorm", "--global_batch_size=2", "--layouts", "dp2"]) == 0
    assert "equal |" in capsys.readouterr().out


def test_compiled_code_is_as_in_training_while_casts_are_widened(tiny_config, in_float64):
    """torch's tracer takes no Tensor.unflatten inside a mode, as that of widened casts is."""
    x = torch.ones(3, 4)
    with quick_compilation(tiny_config(enable_jit=True)), wide_casts():
        split = torch.compile(lambda x: x.float().unflatten(-1, (2, 2)), fullgraph=True)
        assert split(x).dtype == torch.float32 and split(x).shape == (3, 2, 2)
        assert x.float().dtype == torch.float64  # code that is not compiled, after the call


@pytest.mark.slow("compiled blocks of plain tensors, by the command")
def test_compiled_layouts_of_rung_3_are_equal_to_one_device(capsys):
    layouts = ["tp2", "dp2,data_parallel=fsdp"]
    assert plan.main(["check", "--config=quick", "--device=cpu", "--enable_jit", "--layouts", *layouts]) == 0
    assert capsys.readouterr().out.count("equal |") == 2


def test_there_are_sixty_faults():
    assert len(ALL_FAULTS) >= 60 and not FAULTS.keys() & MORE_FAULTS.keys()


@pytest.mark.parametrize("layout", slow_but(LAYOUTS[:-1], LAYOUTS, "tiles of six ranks"))
def test_a_right_layout_is_equal_in_everything_that_is_compared(ranks, tiny_config, tmp_path, layout):
    size, options = ranks_and_options(layout)
    record_in_double(tiny_config(global_batch_size=8), tmp_path / "one.pt")
    result = ranks(size, compare_in_double, tiny_config(global_batch_size=8, **options), tmp_path / "one.pt")[0]
    assert result.equal and result.error < 1e-9 and not result.skipped, result


SPLITS = ("tensor_parallel", "context_parallel", "pipeline_parallel", "domain_parallel", "ensemble_parallel")
ONE = dict.fromkeys(SPLITS, 1)
ONE |= {"gradient_accumulation": 1, "sequence_parallel": False, "data_parallel": "ddp", "dp_shard": None}


@pytest.mark.nightly
@pytest.mark.slow("each of the layouts that plans are verified with")
@pytest.mark.timeout(900)
def test_no_layout_of_verify_yaml_gives_an_alarm(ranks, tmp_path):
    cases = [case for case in build_cases() if case.ranks > 1]
    assert len(cases) > 20
    for case in cases:
        config = case.config.model_copy(update={"device": "cpu", "global_batch_size": 4})
        record_in_double(config.model_copy(update=ONE | {"activation_checkpointing": "none"}), tmp_path / "one.pt")
        result = ranks(case.ranks, compare_in_double, config, tmp_path / "one.pt")[0]
        assert result.equal, (case.name, result)


def test_micro_batches_of_a_forecast_of_several_steps_are_compared(ranks, tiny_config, tmp_path):
    """One device computes them as one batch: a module is called once for each step of the forecast."""
    config = tiny_config(rollout_steps=2, gradient_accumulation=2, global_batch_size=4)
    record_in_double(config.model_copy(update=ONE), tmp_path / "one.pt")
    result = ranks(2, compare_in_double, config, tmp_path / "one.pt")[0]
    assert result.equal and not result.skipped, result


@pytest.mark.parametrize("fault", [None, "another seed"])
def test_batches_of_the_loaders_are_compared(ranks, tiny_config, tmp_path, fault):
    """Each rank reads its band of its samples; a rank with another order of samples is named."""
    config = tiny_config()
    record_in_double(config, tmp_path / "one.pt", read_data=True)
    options = {"domain_parallel": 2, "data_parallel": "fsdp"}
    result = ranks(4, compare_read, config.model_copy(update=options), tmp_path / "one.pt", fault)[0]
    assert result.equal is not bool(fault), result
    assert not fault or (result.stage, result.cause) == (
        "batch",
        "rank 3 alone: other samples, or another part of the image",
    )


OWN = "tests.support.own_models:"
EXACT = [
    ("BiasBeforeNorm", "dp2,sync_batchnorm"), ("BiasBeforeNorm", "domain2"), ("Narrow", "dp2"), ("Narrow", "domain2"),
    ("Tied", "dp2"), ("Taught", "dp2"), ("Taught", "dp2,data_parallel=fsdp"),
    ("Single", "dp2"), ("Single", "domain2"), ("HalfSingle", "dp2"), ("HalfSingle", "domain2"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), EXACT)
def test_a_model_with_zero_gradients_narrow_types_or_masks_gives_no_alarm(ranks, tiny_config, tmp_path, model, layout):
    size, options = ranks_and_options(layout)
    record_in_double(tiny_config(model=OWN + model), tmp_path / "one.pt")
    result = ranks(size, compare_in_double, tiny_config(model=OWN + model, **options), tmp_path / "one.pt")[0]
    assert result.equal and result.error < 1e-9 and not result.skipped, result


def test_a_zero_gradient_is_measured_by_those_of_the_model_and_another_one_by_itself():
    torch.set_default_dtype(torch.float64)
    try:
        small, large = torch.tensor([1e-18]), torch.tensor([1e-3])
        wholes = {(GRADIENT, "bias"): small, (GRADIENT, "weight"): large}
        scales = {GRADIENT: largest_of_stage(wholes, GRADIENT)}
        assert 1e-18 / scale_of((GRADIENT, "bias"), small, scales) < TOLERANCES["float64"]
        assert scale_of((GRADIENT, "weight"), large, scales) == 1e-3
        assert 1e-10 / scale_of((GRADIENT, "bias"), small, scales) > TOLERANCES["float64"]  # that is no rounding
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("model", "layout", "stage", "cause"),
    [
        (
            "Rounded",
            "domain2",
            "forward pass",
            r"rounding of float32: this RoundedMean computes",
        ),
        ("RunningPeak", "dp2", "forward pass", r"^buffers of a rank's own samples \(peak\)"),
        ("GroupNormNet", "dp2,gradient_compression=bf16", "gradient", r"^gradients are reduced in bf16 \(gra"),
        (
            "GroupNormNet",
            "dp2,data_parallel=fsdp,gather_dtype=bf16",
            "forward pass",
            r"^parameters are gathered in bf",
        ),
    ],
)
def test_what_differs_by_design_is_named_as_what_it_is(ranks, tiny_config, tmp_path, model, layout, stage, cause):
    size, options = ranks_and_options(layout)
    record_in_double(tiny_config(model=OWN + model), tmp_path / "one.pt")
    result = ranks(size, compare_in_double, tiny_config(model=OWN + model, **options), tmp_path / "one.pt")[0]
    assert result.stage == stage and re.search(cause, result.cause), result


def test_a_state_that_cannot_be_saved_is_told_of_one_device_and_of_the_layout(tiny_options, capsys):
    assert plan.main(["check", *tiny_options(model=f"{OWN}Unsaved"), "--layouts", "dp2"]) == 1
    told = capsys.readouterr().out
    assert re.search(r"\| dp2 +\| +\d\.\de-1\d \| cannot be saved \|", told)
    assert re.search(r"one device: its state cannot be saved and read back: \w+: ", told), told


def test_a_layouts_name_takes_a_switch_with_its_value():
    assert words_of_name("dp2,sync_batchnorm=true,enable_jit=false,noddp,lr=1e-3") == [
        "--sync_batchnorm", "--no-enable_jit", "--noddp", "--lr=1e-3",
    ]  # fmt: skip


def test_the_command_prints_what_differs_and_ends_with_a_status(tiny_options, tmp_path, capsys):
    words = ["check", *tiny_options(model="tests.support.own_models:BatchNormNet"), "--json", str(tmp_path / "a.json")]
    assert plan.main([*words, "--layouts", "dp2", "domain2"]) == 1
    told = capsys.readouterr().out
    assert re.search(r"\| dp2 +\| +\d\.\de-0\d \| differs: forward pass, 1 \|", told)
    assert re.search(r"\| domain2 +\| +\d\.\de-1\d \| +equal \|", told)
    assert "likely cause: each rank normalizes by the statistics of its own samples" in told
    assert [row["equal"] for row in json.loads((tmp_path / "a.json").read_text())] == [False, True]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--layouts", "tp3"], "tensor parallel: 2 heads cannot be split over 3 ranks"),
        (["--layouts", "sp2"], "layout 'sp2': expected sizes of"),
        (["--layouts", "fsdp2"], "fsdp is what the ranks of dp share, not a dimension: dp2,data_parallel=fsdp"),
        (["--layouts", "tp2xzero1"], "zero1 is .* not a dimension: tp2xdp2,data_parallel=zero1"),
        (["--layouts", "dp3"], "global_batch_size 4 cannot be shared by 3 ranks"),
        (["--layouts", "dp4000", "--global_batch_size=4000"], "4000 ranks are too many"),
        (
            ["--model", "tests.support.without_a_rule:Renormed", "--layouts", "domain2"],
            r"no rule for renorm .* in without_a_rule.py, line \d+",
        ),
        (["--model", "tests.support.own_models:Fails"], r"KeyError: 'no such channel' .*own_models.py, line \d+"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tiny_options, words, line):
    with refusal(line):
        plan.main(["check", *tiny_options(), *words])
