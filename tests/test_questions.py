"""Questions before and after each rung: their answers are those of the code, and a class's answers are counted."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from docs.quiz_page import MARK, anchor_of, questions_as_html
from tests.support import programs
from tests.support.browser import open_chromium
from tools.course.quiz import (
    RUNGS,
    WHEN,
    Question,
    complaint_of,
    numbers,
    quiz_tables,
    read_class,
    read_questions,
    take,
)
from tools.instruments.counting import bytes_sent
from tools.planner.symbols import Symbols
from tools.planner.textbook import block_activations, kept_activations, memory
from tools.planner.textbook_counts import messages
from utils.config import SCRIPTS, load_config
from utils.errors import UsageError

ROOT = Path(__file__).parents[1]
ALL = [(rung, when) for rung in RUNGS for when in WHEN]


def symbols(words, ranks=1, stage=0, **known):
    """Symbols of a layout. known: symbols that a question gives, in place of those of the config."""
    script, *options = words.split()
    config = load_config(options, None, ranks, SCRIPTS[script].yaml_config, SCRIPTS[script].splits)
    made = Symbols(config, config.layout(ranks, 4), stage)
    vars(made).update(known)
    return made


def held(parameters, strategy="ddp", ranks=1):
    s = symbols(f"train.py --config=quick --data_parallel={strategy}", ranks, parameters=parameters)
    of_rank = memory(s)
    return sum(of_rank[kind] for kind in ("parameters", "gradients", "optimizer"))


def sent(s, group, phases=("forward", "backward", "update")):
    """Bytes and number of a step's messages in a group."""
    chosen = [(each, count) for each, count in messages(s).counted.items() if each.group == group]
    chosen = [(each, count) for each, count in chosen if each.phase in phases]
    return sum(each.sent * count for each, count in chosen), sum(count for _, count in chosen)


def flop(rows, inner, columns):
    with FlopCounterMode(display=False) as counted:
        torch.empty(rows, inner, device="meta") @ torch.empty(inner, columns, device="meta")
    return counted.get_total_flops()


def kept_again(blocks, of_block):
    """What blocks keep that are computed again, where each kept `of_block`."""
    s = symbols("train.py --config=quick --activation_checkpointing=full")
    plain = symbols("train.py --config=quick")
    share = (kept_activations(s) - kept_activations(plain)) / (plain.L * block_activations(plain)) + 1
    return blocks * of_block * share


def traffic(strategy):
    s = symbols(f"train.py --config=quick --data_parallel={strategy}", 4)
    return sent(s, "dp")[0]


def left_over(options, tp):
    """Parts of 16 of a block's activations that a rank keeps."""
    words = f"train_mp.py --config=mp_quick --embed_dim=256 --num_heads=8 --tensor_parallel={tp} {options}"
    s = symbols(words, tp)
    return block_activations(s) / (4 * s.layer)


def tokens_of_band(rows, columns, ranks):
    s = symbols(f"train_mp.py --config=mp --context_parallel={ranks}", ranks, patches=(rows, columns))
    return s.n


def waits(stages, parts):
    """Percent of the time in which a stage waits, when each part takes it one slot each way, one after the other."""
    ends = [[0] * (parts + 1) for _ in range(stages + 1)]
    for stage in range(1, stages + 1):
        for part in range(1, parts + 1):
            ends[stage][part] = 1 + max(ends[stage - 1][part], ends[stage][part - 1])
    return 100 * (1 - parts / ends[stages][parts])


def in_flight(stages, parts, schedule):
    words = f"train_mp.py --config=mp --depth=12 --pipeline_parallel={stages} --gradient_accumulation={parts}"
    return symbols(f"{words} --global_batch_size=48 --pp_schedule={schedule}", stages, m=parts).in_flight


def gathered(ranks, tokens, features):
    """Bytes that a rank sends for one block and one sample."""
    words = f"train_shard.py --config=shard --domain_parallel={ranks} --domain_method=gather --depth=1 --amp_mode=none"
    own = tokens // ranks * features
    s = symbols(f"{words} --global_batch_size={ranks}", ranks, layer=own, L=1)
    return sent(s, "domain", ["forward"])[0]


def gradient_of_first_row(kernel):
    """Of a row in the middle, with weights 1 and gradients 1 of all outputs."""
    rows = torch.zeros(1, 1, 20, requires_grad=True)
    F.conv1d(rows, torch.ones(1, 1, kernel), padding=kernel // 2).sum().backward()
    return rows.grad[0, 0, 10].item()


def reach(kernel):
    """Rows of the band before that the first output of a band needs."""
    rows = torch.zeros(1, 1, 40, requires_grad=True)
    F.conv1d(rows, torch.ones(1, 1, kernel), padding=kernel // 2)[0, 0, 20].backward()
    return 20 - rows.grad[0, 0].nonzero().min().item()


def grid(height, width, patch):
    return symbols(f"train.py --config=base --img_size {height} {width} --patch_size={patch}").N


def sample_bytes(tokens, features, blocks):
    s = symbols("train.py --config=quick", layer=tokens * features)
    return blocks * block_activations(s)


THREE_WAYS = "train_mp.py --config=mp --tensor_parallel=4 --context_parallel=2 --pipeline_parallel=2"
# Each number that is asked for, before and after, by the planner's formulas, by torch, or counted out.
COMPUTED = {
    "tokens": (lambda: grid(32, 64, 4), lambda: grid(360, 720, 8)),
    "data_wait": (lambda: 1 / (1 - 0.2), lambda: 1 / (1 - 0.375)),
    "overlap": (lambda: max(100, 150), lambda: max(600 / 2, 200)),
    "mfu": (lambda: 100 * 2 / 0.05 / 100, lambda: 100 * 19.5 / 0.125 / 312),
    "flop": (lambda: flop(100, 200, 300) / 1e6, lambda: flop(4050, 384, 1536) / 1e9),
    "warm_up": (lambda: 8 / 0.25, lambda: 16 / 0.4),
    "recomputation": (lambda: kept_again(12, 100), lambda: kept_again(24, 400)),
    "mean_gradient": (lambda: (3 + 5) / 2, lambda: (1 + 2 + 6 + 3) / 4),
    "memory_ddp": (lambda: held(10e6) / 1e6, lambda: held(300e6, "ddp", 8) / 1e9),
    "memory_fsdp": (lambda: held(1e9, "fsdp", 8) / 1e9, lambda: held(300e6, "fsdp", 16) / 1e9),
    "memory_zero1": (lambda: held(1e6, "zero1", 4) / 1e6, lambda: held(100e6, "zero1", 8) / 1e6),
    "all_reduce_bytes": (lambda: bytes_sent("all_reduce", 100, 4), lambda: bytes_sent("all_reduce", 400, 8)),
    "more_ranks": (
        lambda: bytes_sent("all_reduce", 1e9, 8) / bytes_sent("all_reduce", 1e9, 4),
        lambda: bytes_sent("all_reduce", 1e9, 512) / bytes_sent("all_reduce", 1e9, 8),
    ),
    "fsdp_bytes": (lambda: traffic("fsdp") / traffic("ddp"), lambda: 2.4 * traffic("fsdp") / traffic("ddp")),
    "buckets": (
        lambda: sent(symbols("train.py --config=quick --data_parallel=ddp", 4, parameters=25 * 2**20), "dp")[1],
        lambda: sent(symbols("train.py --config=quick --bucket_cap_mb=50", 4, parameters=80e6), "dp")[1],
    ),
    "quotient": (
        lambda: symbols("train_mp.py --config=mp --tensor_parallel=4", 16).layout.dp,
        lambda: symbols(f"{THREE_WAYS} --gradient_accumulation=2", 128).layout.dp,
    ),
    "tp_memory": (
        lambda: symbols("train_mp.py --config=mp --embed_dim=1000 --tensor_parallel=4", 4).matrices / 1e6,
        lambda: symbols("train_mp.py --config=mp --embed_dim=2048 --tensor_parallel=8", 8).matrices / 1e6,
    ),
    "tp_messages": (
        lambda: sent(symbols("train_mp.py --config=mp --tensor_parallel=4", 4, L=1), "tp", ["forward"])[1],
        lambda: sent(symbols("train_mp.py --config=mp --tensor_parallel=4", 4, L=12), "tp")[1],
    ),
    "tp_left_over": (lambda: left_over("", 4), lambda: left_over("--sequence_parallel", 8)),
    "cp_tokens": (lambda: tokens_of_band(8, 16, 2), lambda: tokens_of_band(45, 90, 4)),
    "bubble": (lambda: waits(2, 2), lambda: waits(4, 12)),
    "in_flight": (lambda: in_flight(3, 6, "gpipe"), lambda: in_flight(4, 16, "1f1b")),
    "sample_memory": (lambda: sample_bytes(1000, 100, 10) / 1e6, lambda: sample_bytes(64800, 768, 6) / 1e9),
    "halo_width": (lambda: reach(3), lambda: reach(7)),
    "halo_backward": (lambda: 1 + 4, lambda: gradient_of_first_row(3)),
    "gather_bytes": (lambda: gathered(2, 1000, 100) / 4, lambda: gathered(4, 4096, 256) / 1e6),
    "factor_of_loss": (lambda: 8 / 2, lambda: math.prod((2, 4))),
    "border": (lambda: 4 * math.sqrt(100 * 100 / 4), lambda: 4 * math.sqrt(360 * 720 / 32)),
}


def test_each_number_is_what_the_code_computes():
    numbers = set()
    for rung in RUNGS:
        sets = read_questions(rung)
        for place, when in enumerate(WHEN):
            for question in sets[when].questions:
                if question.choices:
                    continue
                numbers.add(question.name)
                computed = COMPUTED[question.name][place]()
                assert question.is_right(str(computed)), (question.name, when, computed)
                assert not question.is_right(str(computed * 1.05)), (question.name, when)
    assert numbers == COMPUTED.keys()


@pytest.mark.parametrize("rung", RUNGS)
def test_pairs_ask_for_one_idea_with_other_examples_and_name_their_section(rung):
    before, after = (read_questions(rung)[when].questions for when in WHEN)
    assert len(before) == len(after) == 10 and len({each.name for each in before}) == 10
    for one, other in zip(before, after, strict=True):
        assert bool(one.choices) == bool(other.choices) and one.ask != other.ask
        if one.choices:
            assert one.choices != other.choices
        else:
            assert not one.is_right(other.answer), one.name
        page, _, anchor = one.section.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.M)
        assert anchor in map(anchor_of, headings), one.section
        for each in (one, other):
            assert "|" not in "".join(each.choices) and len(set(each.choices)) == len(each.choices)
            assert len(each.because.split()) >= 4


def test_right_answers_stand_at_every_place():
    """Nobody learns which letter is right."""
    places = []
    for rung, when in ALL:
        for question in read_questions(rung)[when].questions:
            if question.choices:
                places.append(question.choices.index(question.answer))
    assert max(places.count(place) for place in set(places)) <= len(places) / 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("answer: 128", "answer: many", "tokens, before: the answer 'many' is no number"),
        ("answer: bf16", "answer: bf17", "formats, before: the answer 'bf17' is no choice"),
        ("tolerance: 0.01", "tolerence: 0.01", "did you mean 'tolerance'"),
        ("questions:", "question:", "not the form of such a file"),
        ("rung: 1", "rung: [1", "line "),
    ],
)
def test_a_file_of_questions_that_is_wrong_says_where(tmp_path, old, new, said):
    text = (ROOT / "docs/questions/1_one_device.yml").read_text()
    assert old in text
    (tmp_path / "1_mine.yml").write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match=re.escape(said)):
        read_questions(1, tmp_path)


def answer(folder, learner, rung, when, wrong=(), again=""):
    """Answers of a learner, all right but those to the questions of these names."""
    questions = read_questions(rung)[when]
    given = {}
    for question in questions.questions:
        given[question.name] = "7777" if question.name in wrong else question.answer
    own = folder / learner
    own.mkdir(exist_ok=True)
    record = {"rung": rung, "when": when, "questions": questions.mark, "time": f"2{again}", "answers": given}
    file = own / f"quiz_{rung}_{when}{again}.json"
    file.write_text(json.dumps(record))
    return file


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_a_class_sees_shares_and_gains_and_loses_nothing_by_broken_files(tmp_path):
    for learner, wrong in (("anna", ["tokens"]), ("ben", ["tokens", "mfu"])):
        answer(tmp_path, learner, 1, "before", wrong)
        answer(tmp_path, learner, 1, "after", wrong[1:])
    answer(tmp_path, "carl", 1, "after", ["tokens", "flop"])  # who was not there before
    answer(tmp_path, "carl", 2, "before")
    (tmp_path / "emil").mkdir()  # who has answered nothing
    answer(tmp_path, "anna", 1, "after", ["flop"], again="2")  # the first answers count
    other = answer(tmp_path, "dora", 1, "after")
    other.write_text(other.read_text().replace(read_questions(1)["after"].mark, "0" * 12))
    for place, text in enumerate(["{", "[]", '{"rung": 9, "when": "after", "answers": {}}', "[" * 99999, "\0"]):
        (tmp_path / "dora" / f"quiz_{place}.json").write_text(text)
    (tmp_path / "dora/quiz_folder.json").mkdir()
    run = programs.run(["-m", "tools.course", "quiz", tmp_path])
    assert run.returncode == 1
    lines = cells(run.stdout)
    for row in (
        ["tokens", "0", "67", "+100"],
        ["mfu", "50", "67", "+0"],
        ["flop", "100", "67", "+0"],
        ["all", "85", "90", "+10"],
        ["anna", "9", "10", "-"],
        ["ben", "8", "9", "-"],
        ["carl", "-", "8", "10"],
        ["emil", "-", "-", "-"],
    ):
        assert row in lines, row
    assert "1 learner before, 0 after." in run.stdout
    complaints = run.stderr.splitlines()
    assert len(complaints) == 8 and all(str(tmp_path) in line for line in complaints)
    assert sum("other questions" in line for line in complaints) == 1
    assert sum("the first answers count" in line for line in complaints) == 1


def test_a_learner_answers_in_a_terminal_and_the_file_counts(tmp_path):
    questions = read_questions(2)["after"]
    letters = [["a", "b", "c"][q.choices.index(q.answer)] if q.choices else q.answer for q in questions.questions]
    # No number, a doubtful one, no such letter, and the last is not known.
    lines = iter(["many", "1,000", *letters[:-1], "d", ""])
    own = tmp_path / "anna"
    own.mkdir()
    said = []
    file = take(own, questions, lambda _: next(lines), said.append)
    assert sum(line.strip() == "A number, please." for line in said) == 1
    assert sum("may be 1 or 1000" in line for line in said) == 1
    assert sum(line.strip() == "A letter, please." for line in said) == 1
    assert sum("Right." in line for line in said) == 9
    (handed,), complaints = read_class(tmp_path)
    assert complaints == [] and handed.learner == "anna" and sum(handed.right.values()) == 9
    assert "anna" in quiz_tables([handed])
    with pytest.raises(UsageError, match=f"{file.name}: these questions are answered"):
        take(own, questions, input, print)


# What learners write, and what it may mean.
WRITTEN = {
    "4.8": [4.8],
    "4,8": [4.8],
    " -0,125 ": [-0.125],
    ",5": [0.5],
    "12,34": [12.34],
    "1,0000": [1],
    "1,000": [1, 1000],
    "28,125": [28.125, 28125],
    "1,000.5": [1000.5],
    "1.000,5": [1000.5],
    "4.050,0": [4050],
    "1,000,000": [1e6],
    "1e3": [1000],
    "4.050": [4.05],
    "": [],
    "many": [],
    "4,": [],
    "1,00,0": [],
    "1e999": [],
    "nan": [],
    "0x10": [],
    "1_000": [],
}


def test_a_decimal_comma_is_one_in_a_terminal_and_on_a_page():
    for text, meant in WRITTEN.items():
        assert numbers(text) == meant, text
    tokens = Question("tokens", "", "", "4.8", "")
    assert tokens.is_right("4,8") and not tokens.is_right("48")
    node = shutil.which("node")
    if not node:
        pytest.skip("no node: the page is not compared")
    # The script asks for a page when it is loaded, and finds none.
    script = (ROOT / "docs/moving/questions.js").read_text()
    script = f"const document = {{ addEventListener() {{}} }};\n{script}\n"
    texts = json.dumps(list(WRITTEN))
    script += f"console.log(JSON.stringify({texts}.map(each => [numbersOf(each), complaintOf(each)])))"
    done = subprocess.run([node, "-"], input=script, capture_output=True, text=True, check=True)
    of_page = json.loads(done.stdout)
    assert of_page == [[meant, complaint_of(text)] for text, meant in WRITTEN.items()]


def test_a_quiz_that_is_broken_off_or_misses_a_word_ends_with_one_line(tmp_path):
    def end(_):
        raise EOFError

    with pytest.raises(UsageError, match="nothing was written"):
        take(tmp_path, read_questions(1)["before"], end, [].append)
    assert list(tmp_path.iterdir()) == []
    for words, said in (
        (["--take", "2"], "add --before or --after"),
        (["--after"], "goes with --take"),
        ([tmp_path], "no answers in it"),
        ([tmp_path / "none"], "no such folder"),
    ):
        run = programs.run(["-m", "tools.course", "quiz", *words])
        assert run.returncode == 2 and said in run.stderr and len(run.stderr.splitlines()) == 1


def test_the_page_has_each_set_once():
    text = (ROOT / "docs/questions.md").read_text()
    assert MARK.findall(text) == [(str(rung), when) for rung, when in ALL]
    for rung, page in enumerate(("one_device", "data_parallel", "model_parallel", "domain_parallel"), 1):
        lesson = (ROOT / f"docs/{page}.md").read_text()
        assert f"questions.md#before-rung-{rung})" in lesson and f"questions.md#after-rung-{rung})" in lesson
    html = questions_as_html(read_questions(2)["after"])
    assert html.count("<details") == html.count("</details>") == 11 and html.count("<noscript>") == 2
    assert 'href="data_parallel.html#the-idea"' in html


@pytest.mark.slow("a browser takes seconds to start")
def test_the_page_judges_at_once_and_saves_what_the_instructor_reads(tmp_path):
    questions = read_questions(1)["before"]
    scripts = ""
    for name in ("questions.js", "quiz.js"):
        scripts += f'<script src="file://{ROOT}/docs/moving/{name}"></script>'
    file = tmp_path / "page.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{questions_as_html(questions)}{scripts}")
    own = tmp_path / "class/anna"
    own.mkdir(parents=True)
    with open_chromium() as browser:
        page = browser.new_page()
        page.goto(file.as_uri())
        page.locator("details.quiz > summary").click()
        forms = page.locator("form.predict").all()
        assert len(forms) == 10 and page.get_by_role("button", name="save the answers").is_disabled()
        for place, (form, question) in enumerate(zip(forms, questions.questions, strict=True)):
            if question.choices:
                form.locator("select").select_option(question.answer)
            else:
                form.locator("input").fill("7777" if place == 1 else question.answer)
            form.locator("button").click()
        assert forms[0].locator("[role=status]").inner_text() == "Right."
        forms[1].locator("input").fill(questions.questions[1].answer)  # too late: the first answer counts
        forms[1].locator("button").click()
        assert "10 of 10 answered, 9 right at the first try" in page.locator("details.quiz").inner_text()
        with page.expect_download() as saved:
            page.get_by_role("button", name="save the answers").click()
        assert saved.value.suggested_filename == "quiz_1_before.json"
        saved.value.save_as(own / saved.value.suggested_filename)
    (handed,), complaints = read_class(tmp_path / "class")
    assert complaints == [] and [name for name, right in handed.right.items() if not right] == ["data_wait"]
