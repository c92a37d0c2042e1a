"""Layouts that the planner proposes: those, and no others, that the scripts run."""

import itertools
import shlex

import pytest

from tests.support.marks import slow_but
from tools.planner.layouts import candidates, command, script_of, split_refusal, trial
from utils.config import SCRIPTS, load_config
from utils.layout import Layout

SMALL = ["--yaml_config=config/mp.yaml", "--config=mp_quick"]  # 4 heads, 4 blocks, 8 x 16 patches


@pytest.mark.parametrize(
    "method", slow_but(["gather"], ["gather", "ring", "all_to_all"], "the other methods of attention")
)
@pytest.mark.parametrize("dropout", slow_but([0.1], [0.0, 0.1], "refusals without dropout"))
def test_a_split_of_one_block_and_of_stages_is_refused_exactly_when_the_whole_split_is(method, dropout):
    config = load_config(SMALL).model_copy(update={"dropout": dropout, "cp_method": method, "domain_method": method})
    refusal, refused = trial(config), 0
    sizes = [(tp, cp, pp, 1) for tp, cp, pp in itertools.product((1, 2, 3, 8), (1, 2, 3, 16), (1, 2, 3, 8))]
    sizes += [(tp, 1, 1, domain) for tp in (1, 2, 3) for domain in (2, 3, 16, "2x2", "4x3", "1x32", "8x2")]
    for (tp, cp, pp, domain), schedule in itertools.product(sizes, ("1f1b", "interleaved")):
        settings = {
            "tensor_parallel": tp, "context_parallel": cp, "pipeline_parallel": pp, "domain_parallel": domain,
            "sequence_parallel": domain == 1, "cp_method": method, "domain_method": method, "pp_schedule": schedule,
        }  # fmt: skip
        tried = config.model_copy(update=settings)
        if not (tp == 1 and schedule == "interleaved" and pp == 1):
            found, real = refusal(settings), split_refusal(tried)
            assert bool(found) == bool(real), (tp, cp, pp, domain, found, real)
            refused += bool(real)
    assert refused > 10


def test_a_refusal_says_what_the_script_says():
    config = load_config(SMALL)
    columns = "domain parallel: 16 columns of patches cannot be split over 32 ranks"
    assert split_refusal(config.model_copy(update={"domain_parallel": "1x32"})) == columns
    classifier = load_config(["--yaml_config=config/shard.yaml", "--config=classify_quick"])
    assert "head gives no image" in split_refusal(classifier.model_copy(update={"context_parallel": 2}))
    _, refused = candidates(config, 8, 8)
    assert refused["tensor parallel: 4 heads cannot be split over 8 ranks"] > 0


@pytest.mark.parametrize("gpus", slow_but([1], [1, 4, 6], "all commands of a whole node", nightly=True))
def test_the_scripts_take_every_command(gpus):
    found, _ = candidates(load_config(SMALL), gpus, 4)
    assert len(found) == len({command(config, layout, SMALL) for config, layout in found})
    for config, layout in found:
        words = shlex.split(command(config, layout, SMALL))
        script = script_of(vars(config))
        start = next(i for i, word in enumerate(words) if word in (script, SCRIPTS[script].submit))
        again = load_config(words[start + 1 :], None, gpus, *SCRIPTS[script][:2])
        assert again == config
        assert again.layout(gpus, 4) == layout


def test_layouts_cover_all_kinds_of_parallelism():
    found, _ = candidates(load_config(["--yaml_config=config/mp.yaml", "--config=mp"]), 16, 4)
    for wanted in (
        {"tensor_parallel": 4, "sequence_parallel": True},
        {"context_parallel": 4, "cp_method": "ring"},
        {"pipeline_parallel": 4, "pp_schedule": "1f1b"},
        {"domain_parallel": "2x2", "domain_method": "gather"},
        {"data_parallel": "hsdp", "activation_checkpointing": "full"},
        {"tensor_parallel": 1, "context_parallel": 1, "domain_parallel": 1, "data_parallel": "ddp"},
    ):
        assert any(vars(config) == vars(config) | wanted for config, _ in found), wanted
    assert max(layout.tp for _, layout in found) == 4


def test_what_was_fixed_stays():
    words = ["--yaml_config=config/mp.yaml", "--config=mp"]
    config = load_config(words).model_copy(update={"tensor_parallel": 2, "data_parallel": "fsdp"})
    found, _ = candidates(config, 16, 4, {"row_parallel_size", "data_parallel"})
    assert {(c.tensor_parallel, c.data_parallel) for c, _ in found} == {(2, "fsdp")}
    assert len({c.context_parallel for c, _ in found}) > 1
    assert candidates(config, 15, 4, {"tensor_parallel"}) == (
        [], {"15 ranks cannot be split as tp 2 x dp: 15 is not a multiple of 2": 1}
    )  # fmt: skip


def test_commands_name_nodes_and_ranks():
    words = ["--yaml_config=config/mp.yaml", "--config=mp", "--lr=1e-4"]
    config = load_config(words).model_copy(update={"tensor_parallel": 4})
    one_node = "torchrun --nproc_per_node=4 train_mp.py --config=mp --lr=0.0001 --tensor_parallel=4"
    assert command(config, Layout(4, 4), words) == one_node
    assert command(config, Layout(16, 4), words).startswith("sbatch -N 4 submit_mp.sh --config=mp")
    assert command(config, Layout(16, 4), words, 8).startswith("sbatch -N 2 --gpus-per-node=8 submit_mp.sh")
