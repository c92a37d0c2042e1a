"""plan.py check --all: what it draws, what it finds, and how small it makes a finding."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

import plan
from tests.support.compositions import PlantedTeams, composition_of, stuck, verdict_of
from tests.support.marks import needs_torch, slow_rows_but
from tests.support.refusals import refusal
from tools.compositions import choices, judge, search
from tools.compositions.choices import Choice, all_choices, keys_that_take_part, values_of
from tools.compositions.composition import Base, settings_of
from tools.compositions.drawing import Draws
from tools.compositions.judge import EQUAL, FINDING, REFUSED, Judge, JudgeEnded, Verdict
from tools.instruments.ranks import Teams
from utils import schema
from utils.errors import INTERRUPTED_STATUS
from utils.schema import Config, key

SEVERAL = [
    ("dp=2 data_parallel=zero1 gradient_accumulation=2", "tensor_parallel=2"),
    ("domain_parallel=2 data_parallel=fsdp ema=0.5", "dp=4"),
    ("context_parallel=2 rollout_steps=2 activation_checkpointing=full", None),
    ("dp=2 rollout_schedule=[1,2] forcings=latitude;day", None),
    ("loss=crps ensemble_size=4 ensemble_parallel=2 ema=0.5 rollout_steps=2", "ensemble_parallel=3"),
]
FOUND = [
    ("a sum is left out", "tensor_parallel=2 ema=0.5", None, "losses"),
    pytest.param(
        *("a rank has gradients of its own", "dp=2 clip_grad_norm=0.5", None, "norms"),
        marks=needs_torch((2, 13), "shows it in the losses first"),
    ),
    pytest.param(
        *("sharded ranks ignore clip_grad_norm", "dp=2 data_parallel=fsdp clip_grad_norm=0.01", None, "losses"),
        marks=pytest.mark.slow("an option that one strategy ignores"),
    ),
    ("an average is not updated", "dp=2 ema=0.5", None, "validation"),
    ("no moments are read back", "dp=2", "dp=2 data_parallel=fsdp", "resumed: losses"),
]


@pytest.fixture
def base():
    return Base([])


@pytest.mark.parametrize(("words", "then"), slow_rows_but([0, 4], SEVERAL, "other right compositions"))
def test_right_compositions_are_equal_resumed_in_another_layout_too(ranks, words, then):
    assert verdict_of(ranks, words, then) == Verdict(EQUAL)


@pytest.mark.parametrize(("plant", "words", "then", "kind"), FOUND)
def test_a_planted_fault_is_found(ranks, plant, words, then, kind):
    verdict = verdict_of(ranks, words, then, plant)
    assert (verdict.result, verdict.kind) == (FINDING, kind), verdict


def test_an_error_on_a_rank_is_a_finding_and_a_refusal_is_none(ranks):
    with pytest.raises(AssertionError, match="no such bucket"):  # the tests' ranks raise it; a Judge's are ended
        verdict_of(ranks, "dp=2", plant="an error on all ranks")
    assert verdict_of(ranks, "data_parallel=zero1 noddp").result == REFUSED  # by the config
    verdict = verdict_of(ranks, "tensor_parallel=3 num_heads=4")
    assert verdict.result == REFUSED and "4 heads cannot be split over 3 ranks" in verdict.text  # by the ranks
    assert "\n" not in verdict.text


@pytest.mark.slow("a fault of real ranks, which is made small by asking them again and again")
def test_what_the_schema_says_of_an_option_that_is_ignored_in_one_layout_is_made_small(ranks, base):
    """Of seven choices three are left: the layout, the strategy that ignores the key, and the key."""
    found = composition_of(
        "dp=2 ema=0.5 data_parallel=fsdp enable_fused clip_grad_norm=0.01 prefetch=1 lr_schedule=constant"
    )
    with Judge(base, teams=PlantedTeams(ranks, "sharded ranks ignore clip_grad_norm"), plans=False) as judged:
        smallest, verdict = search.shrink(found, judged.judge(found), judged)
    assert {choice.name for choice in smallest.choices} == {"dp=2", "data_parallel=fsdp", "clip_grad_norm=0.01"}
    assert verdict.result == FINDING
    words = base.command(smallest).split()
    assert words[:5] == ["python", "plan.py", "check", "--all", "--ranks=2"] and "--clip_grad_norm=0.01" in words


class FakeJudge:
    """It finds fault with whatever holds all of some choices."""

    def __init__(self, *guilty, kind="losses"):
        self.guilty, self.kind, self.judged = set(guilty), kind, []

    def judge(self, composition):
        self.judged.append(composition)
        names = {choice.name for choice in (*composition.choices, *(composition.then or ()))}
        if "lr=0.5" in names and "lr=0.5" not in self.guilty:
            return Verdict(FINDING, "traceback", "another fault")
        return Verdict(FINDING, self.kind, "wrong") if self.guilty <= names else Verdict(EQUAL)


@pytest.mark.parametrize(
    ("guilty", "words", "then", "left"),
    [
        (("dp=2", "ema=0.5"), "dp=2 ema=0.5 seed=2 depth=4 warmup=1 prefetch=1", None, {"dp=2", "ema=0.5"}),
        (("seed=2",), "dp=2 seed=2", "dp=4", {"seed=2"}),
        (("seed=2", "prefetch=1"), "dp=2 seed=2", "dp=4 prefetch=1", {"seed=2", "prefetch=1"}),
        ((), "dp=2 seed=2", None, set()),
    ],
)
def test_shrinking_leaves_the_smallest_set_that_is_still_wrong(guilty, words, then, left):
    composition = composition_of(words, then)
    smallest, _ = search.shrink(composition, Verdict(FINDING, "losses"), FakeJudge(*guilty))
    assert {choice.name for choice in (*smallest.choices, *(smallest.then or ()))} == left
    assert (smallest.then is None) == (not then or not left & {choice.name for choice in composition.then})


def test_another_fault_met_while_shrinking_is_not_taken_for_the_first():
    composition = composition_of("dp=2 lr=0.5 seed=2")
    judged = FakeJudge("dp=2", "seed=2", "lr=0.5")
    smallest, verdict = search.shrink(composition, judged.judge(composition), judged)
    assert smallest == composition and verdict.kind == "losses"


def test_a_known_finding_is_counted_and_not_made_small_again(base):
    report, judged = search.Report(0), FakeJudge("dp=2")
    searching = search.Search(base, [], report)
    for words in ("dp=2 seed=2", "dp=2 ema=0.5"):
        composition = composition_of(words)
        searching.note(composition, judged.judge(composition), judged)
    assert [(finding.composition.name, finding.seen) for finding in report.findings] == [("dp=2", 2)]


def test_a_seed_draws_the_same_compositions_and_another_one_others(base):
    def drawn(seed):
        return [one.name for one in islice(Draws(base, all_choices(base.config), seed), 12)]

    first = drawn(3)
    assert first == drawn(3) and first != drawn(4)


def test_compositions_have_two_to_six_choices_of_different_keys_and_are_legal(base):
    draws = Draws(base, all_choices(base.config), 5)
    before, found = len(draws.uncovered), list(islice(draws, 40))
    for composition in found:
        keys = [choice.key for choice in composition.choices]
        assert 2 <= len(keys) <= 6 and len(set(keys)) == len(keys)
        assert base.case(composition.choices).ranks <= 4
    assert before - len(draws.uncovered) > 5 * len(found)  # pairs of several choices are covered at once
    assert 5 < sum(one.then is not None for one in found) < 25
    assert sum(base.case(one.choices).ranks > 1 for one in found) > 30


class Wider(Config):
    colour: Literal["red", "green"] = key("a new key", "red", "layout")
    quick_norm: bool = key("a new switch", False)
    beats: schema.NonNegativeInt = key("a new number", 0, "training")
    label: schema.Text = key("text says nothing of what to try", "a", "training")
    greeting: bool = key("a key without effect", False, "nothing")


def test_a_new_key_of_the_schema_takes_part_without_being_named(monkeypatch, base):
    for module in (schema, choices):
        monkeypatch.setattr(module, "Config", Wider)
    wider = Wider(**base.config.model_dump())
    names = {choice.name for choice in all_choices(wider)}
    assert {"colour=green", "quick_norm=True", "beats=2"} <= names
    assert not any("greeting" in name or "colour=red" in name for name in names)
    assert "label" in choices.keys_without_values(wider)
    assert "colour" in choices.keys_of_layouts() and "beats" not in choices.keys_of_layouts()


def test_choices_of_layouts_bring_along_nothing_that_changes_numbers(base):
    """A run that goes on in another layout keeps its numbers, and leaves out what says how work is shared."""
    of_layouts = [choice for choice in all_choices(base.config) if choice.key in choices.keys_of_layouts()]
    assert len(of_layouts) > 20
    for choice in of_layouts:
        assert list(choice.settings) == [choice.key]


def test_a_choice_that_needs_another_one_is_drawn_with_it(base):
    there = {choice.name: choice for choice in all_choices(base.config)}
    draws = Draws(base, list(there.values()), 0)
    pair = [there["ensemble_parallel=2"], there["lr_schedule=constant"]]
    assert draws._made_legal(pair) == [*pair, there["ensemble_size=4"]]


def test_values_follow_from_type_bounds_and_what_is_there(base):
    assert values_of("data_parallel", "ddp") == ["zero1", "zero2", "fsdp", "hsdp"]
    assert values_of("enable_fused", False) == [True] and values_of("tensor_parallel", 1) == [2]
    assert values_of("ema", None) == [0.5] and values_of("wrap_min_params", 1_000_000) == [2]
    assert values_of("bucket_cap_mb", 25) == [0.01] and values_of("train_data_path", "a") == []
    for name in keys_that_take_part():
        for value in values_of(name, getattr(base.config, name)):
            Config(**base.config.model_dump() | {name: value})  # within the schema


def test_one_device_has_the_options_that_change_numbers_and_no_others(base):
    def reference(words):
        return base.reference(composition_of(words).choices).config

    whole = reference("dp=2 gradient_accumulation=2 ema=0.5 data_parallel=fsdp")
    assert (whole.gradient_accumulation, whole.ema, whole.data_parallel) == (1, 0.5, "ddp")
    assert reference("dp=2 data_parallel=fsdp gather_dtype=bf16").gather_dtype == "bf16"  # which ddp refuses
    assert not reference("dp=2 enable_jit").enable_jit  # held against what is not compiled
    unet = 'model=unet model_args={"width":4,"levels":1} gradient_accumulation=2'
    assert reference(unet).gradient_accumulation == 2  # BatchNorm takes the statistics of a micro-batch
    resumed = base.resumed(composition_of(unet, "dp=2 gradient_accumulation=4"))
    assert settings_of(resumed)["gradient_accumulation"] == 2 and settings_of(resumed)["dp"] == 2


def test_what_one_choice_brings_along_gives_way_to_another():
    model = Choice("model=unet", {"model": "unet", "model_args": {"width": 4}})
    arguments = Choice("model_args={}", {"model_args": {}})
    assert settings_of([arguments, model])["model_args"] == settings_of([model, arguments])["model_args"] == {}


def test_the_report_is_json_and_text_and_the_status_says_whether_something_was_found(
    tmp_path, monkeypatch, capsys, base
):
    monkeypatch.setattr(Judge, "__init__", lambda self, *_: None)
    monkeypatch.setattr(Judge, "__exit__", lambda *_: None)
    monkeypatch.setattr(Judge, "judge", FakeJudge("tensor_parallel=2").judge)
    ticks = count()  # a clock that goes on by a second with each composition, however long that takes
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    words = ["check", "--all", "--jobs", "1", "--minutes", "0.4", "--seed", "8", "--json", str(tmp_path / "found.json")]
    assert plan.main(words) == 1
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["seed"] == 8 and told["finding"] > 0 and told["equal"] > 0
    (finding,) = told["findings"]
    assert finding["command"].startswith("python plan.py check --all --ranks=2 --tensor_parallel=2")
    assert told["pairs"]["all"] > 3000 and "seed 8: " in capsys.readouterr().out
    monkeypatch.setattr(Judge, "judge", FakeJudge("nothing of this name").judge)
    assert plan.main(words) == 0


def test_an_interrupted_search_tells_what_it_has_found(tmp_path, monkeypatch, capsys):
    def interrupted(self, composition):
        if next(judged) == 3:
            raise KeyboardInterrupt
        return Verdict(EQUAL)

    judged = count()
    monkeypatch.setattr(Judge, "__init__", lambda self, *_: None)
    monkeypatch.setattr(Judge, "__exit__", lambda *_: None)
    monkeypatch.setattr(Judge, "end", lambda self: None)
    monkeypatch.setattr(Judge, "judge", interrupted)
    words = ["check", "--all", "--jobs", "1", "--seed", "7", "--json", str(tmp_path / "found.json")]
    assert plan.main(words) == INTERRUPTED_STATUS
    assert "seed 7: 3 compositions: 3 equal" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["equal"] == 3


class BusyJudge:
    """Two of them do not answer where both are at work; one that is alone does, unless it really hangs."""

    at_work = 0
    lock = threading.Lock()

    def __init__(self, both, hangs):
        self.both, self.hangs, self.times = both, hangs, 0

    def judge(self, composition):
        self.times += 1
        if self.times == 1:
            self.both.wait(60)
            return Verdict(FINDING, "one device: hang", "no answer")
        with self.lock:
            BusyJudge.at_work += 1
        time.sleep(0.05)  # long enough to be seen by the other
        is_alone = BusyJudge.at_work == 1
        with self.lock:
            BusyJudge.at_work -= 1
        return Verdict(EQUAL) if is_alone and not self.hangs else Verdict(FINDING, "hang", "no answer")

    def end(self):
        """Nothing is running."""


@pytest.mark.parametrize(("hangs", "result"), [(False, EQUAL), (True, FINDING)])
def test_who_did_not_answer_beside_others_is_asked_again_alone(monkeypatch, base, hangs, result):
    ticks = count()
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    draws = SimpleNamespace(refusals=Counter(), pairs=[], uncovered=(), illegal=())
    report, both = search.Report(0), threading.Barrier(2)
    searching = search.Search(base, Draws(base, all_choices(base.config), 0), report)
    searching.draws, searching.compositions = draws, repeat(composition_of("dp=2"))
    searching.run([BusyJudge(both, hangs), BusyJudge(both, hangs)], end=1)
    assert report.results == {result: 2}


def test_a_judge_that_is_ended_from_another_thread_raises_and_leaves_no_rank(monkeypatch, base):
    monkeypatch.setattr(judge, "try_out", stuck)
    with Judge(base, patience=60, plans=False) as judged, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(judged.judge, composition_of("dp=2"))
        deadline = time.monotonic() + 60
        while not (2 in judged.teams.running and len(judged.teams.running[2].processes) == 2):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        judged.end()
        with pytest.raises(JudgeEnded):
            waiting.result(timeout=60)
        assert 2 not in judged.teams.running


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--then=--ranks=2"], "--then belongs to --ranks"),
        (["--ranks=3", "--tensor_parallel=2"], "--ranks 3: not a multiple of the 2"),
        (["--minutes=-1"], "-1 is not within 0 to"),
        (["--model=vitt"], "model 'vitt' .did you mean 'vit'"),
    ],
)
def test_what_cannot_be_searched_is_one_line(words, line):
    with refusal(line):
        plan.main(["check", "--all", *words])


def test_ranks_that_do_not_answer_are_a_finding_and_are_ended(monkeypatch, base):
    monkeypatch.setattr(judge, "try_out", stuck)
    with Judge(base, patience=5, plans=False) as judged:
        verdict = judged.judge(composition_of("dp=2"))
        assert (verdict.result, verdict.kind) == (FINDING, "hang")
        assert 2 not in judged.teams.running


@pytest.mark.slow("processes of its own, plans beside ranks, a stop and resume from the command line")
def test_a_command_of_one_composition_runs(capsys):
    words = ["check", "--all", "--ranks=2", "--data_parallel=fsdp", "--then=--ranks=2 --tensor_parallel=2"]
    assert plan.main(words) == 0
    assert "1 compositions: 1 equal" in capsys.readouterr().out


def test_counts_that_are_not_planned_are_told():
    counted = Counter({"parameters": 8, "FLOP": 5})
    assert judge.unplanned(counted, Counter({"parameters": 8, "FLOP": 4})) == ["5 FLOP planned as 4"]
    assert judge.unplanned(counted, Counter(counted)) == []


def test_ranks_that_come_to_many_meshes_have_one_device_for_all_groups(base):
    with Teams(base.config, many_meshes=True) as teams:
        few, many = teams.call(2, threads_of_groups, 20)[0]
    assert many == few


def threads_of_groups(rank, count):
    """The threads of gloo's devices with one group, and with `count` more."""

    def threads():
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return sum(name.startswith("gloo_tcp_loop") for name in names)

    few = threads()
    groups = [torch.distributed.new_group() for _ in range(count)]
    for group in groups:
        torch.distributed.all_reduce(torch.ones(1), group=group)
    return few, threads()
