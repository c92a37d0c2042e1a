"""Pictures that move: their numbers are those of the code, and each step can be read on every screen, by everyone."""

import importlib
import random
import re
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from docs.site_hooks import MOVING
from docs.traces import data as traces
from tests.support.browser import MISPLACED, open_chromium
from tools.instruments.counting import bytes_sent
from tools.planner.symbols import Symbols
from tools.planner.textbook import buffer_bytes
from tools.planner.textbook_counts import messages
from training.forecasting.crps import crps_of_points
from utils.config import SCRIPTS, load_config

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/moving"
SCRIPT_FILES = re.findall(r"^    - moving/(\w+\.js)$", (ROOT / ".mkdocs.yml").read_text(), re.M)
COLLECTIVES = ("broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
WIDTHS = (1400, 400)
# Of every picture: each value of each control by itself, the others as they are, and every step of it.
WALK = f"""(figure) => {{
    const misplaced = {MISPLACED}, stepper = figure.stepper, found = [], kinds = stepper.picture.controls || []
    const variants = [{{}}]
    for (const {{ name, options, min, max }} of kinds)
        for (const value of options || Array.from({{ length: max - min + 1 }}, (_, i) => min + i))
            variants.push({{ [name]: value }})
    const plain = {{ ...stepper.values }}
    let steps = 0
    const sentences = new Set()
    for (const variant of variants) {{
        stepper.values = {{ ...plain, ...variant }}
        for (let step = 0; step <= stepper.last(); step++, steps++) {{
            stepper.go(step)
            const svg = figure.querySelector("svg"), where = `${{JSON.stringify(variant)}} step ${{step}}: `
            found.push(...misplaced(svg).map(words => where + words))
            sentences.add(stepper.said.textContent)
            const sizes = [...svg.querySelectorAll("text")].map(each => Number(each.getAttribute("font-size")))
            const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width
            if (sizes.some(size => size * scale < 11)) found.push(where + "type of less than 11 px")
            if (svg.getBoundingClientRect().right > innerWidth) found.push(where + "wider than the screen")
            const words = svg.textContent + stepper.said.textContent
            if (/NaN|undefined|Infinity/.test(words)) found.push(where + "no number")
        }}
    }}
    return {{ found, steps, sentences: sentences.size }}
}}"""


@pytest.fixture(scope="module")
def browser():
    with open_chromium() as opened:
        yield opened


def page_of(browser, folder, width=1400):
    """A page with every picture, from files alone."""
    figures = "".join(
        f'<figure class="drawing" data-picture="{name}"><div class="scroll">'
        f'<img alt="" src="file://{ROOT}/docs/images/drawings/{name}.svg"></div></figure>'
        for name in MOVING
    )
    scripts = "".join(f'<script src="file://{FOLDER}/{name}"></script>' for name in SCRIPT_FILES)
    question = (
        '<details class="predict" data-answer="75.32" data-tolerance="0.02" data-unit="MiB"><summary>How many?'
        '</summary>16 bytes each.</details><details class="predict" data-choices="ddp|fsdp" data-answer="fsdp">'
        "<summary>Which?</summary>It gathers twice.</details>"
    )
    file = folder / f"page{width}.html"
    style = f'<link rel="stylesheet" href="file://{FOLDER}/moving.css"><style>html {{ font-size: 125% }}</style>'
    file.write_text(f"<!doctype html><meta charset=utf-8>{style}<body>{figures}{question}{scripts}")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("svg")
    return page


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    return page_of(browser, tmp_path_factory.mktemp("page"))


def test_every_picture_of_a_page_is_there():
    """The hook of the site, the pictures and the drawings that stand for them name the same."""
    code = "".join((FOLDER / name).read_text() for name in SCRIPT_FILES)
    assert set(re.findall(r"^PICTURES\.(\w+) = ", code, re.M)) == set(MOVING)
    pages = "".join(file.read_text() for file in ROOT.glob("docs/*.md"))
    for name in MOVING:
        assert f"images/drawings/{name}.svg)" in pages, name


@pytest.mark.slow("a browser takes seconds to start")
@pytest.mark.parametrize("width", WIDTHS)
def test_every_step_of_every_picture_can_be_read(browser, tmp_path, width):
    page = page_of(browser, tmp_path, width)
    for name in MOVING:
        walked = page.evaluate(f"({WALK})(document.querySelector('[data-picture={name}]'))")
        assert walked["found"] == [], name
        if name == "ddp_buckets":
            counts = [formula(page, "buckets", 85e6, cap) for cap in (25, 1, 5, 10, 25, 50, 100, 400)]
            assert walked["steps"] == sum(counts) + len(counts)  # one for each bucket, and one before
        assert walked["steps"] >= 5 and walked["sentences"] >= 4, name
        page.locator(f"[data-picture={name}]").screenshot(path=tmp_path / f"{name}_{width}.png")
    halo = page.locator("[data-picture=halo] svg")
    assert halo.locator(".late").count() == 4  # rows with a sum have a colour that no rank has
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.errors == []


@pytest.mark.slow("a browser takes seconds to start")
def test_a_picture_goes_by_keyboard_says_its_step_and_is_a_drawing_on_paper(page):
    figure = page.locator("[data-picture=ring]")
    frame = figure.locator("[role=group]")
    frame.focus()
    before = figure.locator("[aria-live]").inner_text()
    page.keyboard.press("ArrowRight")
    assert "step 1 of 6" in figure.inner_text()
    assert figure.locator("[aria-live]").inner_text() != before
    page.keyboard.press("ArrowLeft")
    assert figure.locator("[aria-live]").inner_text() == before
    assert figure.locator("svg").get_attribute("aria-label") == frame.get_attribute("aria-label") != ""
    assert figure.locator("button", has_text="back").is_disabled()
    figure.locator("[name=ranks]").fill("6")
    assert "of 10" in figure.inner_text()
    assert not figure.locator("img").is_visible()
    page.emulate_media(media="print")
    assert figure.locator("img").is_visible() and not frame.is_visible()
    page.emulate_media(media="screen")


@pytest.mark.slow("a browser takes seconds to start")
def test_rank_2_is_asked_what_it_sends(page):
    figure = page.locator("[data-picture=collectives]")
    figure.locator("[name=kind]").select_option("all_to_all")
    figure.locator(".asked button", has_text="check").click()
    assert "Not yet: rank 1 needs 10" in figure.locator(".asked").inner_text()
    figure.locator(".asked button.number", has_text="10").click()
    figure.locator(".asked button", has_text="check").click()
    assert figure.locator(".asked [role=status]").inner_text().strip() == "Right."


@pytest.mark.slow("a browser takes seconds to start")
def test_a_question_takes_an_answer_before_it_shows_its_own(page):
    number, choice = page.locator("form.predict").all()
    assert not page.get_by_text("16 bytes each.").is_visible()
    number.locator("input").fill("many")
    number.locator("button").click()
    assert number.locator("[role=status]").inner_text() == "A number, please."
    assert not page.get_by_text("16 bytes each.").is_visible()
    right = ("75", "Right."), ("75,3", "Right.")
    for given, reply in (("18", "You said 18. It is 75.32 MiB."), *right):
        number.locator("input").fill(given)
        number.locator("button").click()
        assert number.locator("[role=status]").inner_text() == reply
        assert page.get_by_text("16 bytes each.").is_visible()
    choice.locator("select").select_option("ddp")
    choice.locator("button").click()
    assert "You said ddp. It is fsdp." in choice.inner_text() and page.get_by_text("It gathers twice.").is_visible()


def test_questions_of_pages_have_the_answers_that_they_explain():
    """A choice is among its choices, and a number stands in its explanation."""
    asked = 0
    for file in ROOT.glob("docs/*.md"):
        for attributes, text in re.findall(r"<details class=\"predict\"(.*?)>(.*?)</details>", file.read_text(), re.S):
            asked += 1
            data = dict(re.findall(r'data-(\w+)="([^"]*)"', attributes))
            explained = text.split("</summary>")[1]
            assert len(explained.split()) >= 5, file.name
            if "choices" in data:
                assert data["answer"] in data["choices"].split("|"), file.name
                continue
            numbers = re.findall(r"[\d,]*\d(?:\.\d+)?", explained)
            assert float(data["answer"]) in [float(number.replace(",", "")) for number in numbers], (file.name, data)
    assert asked >= 10


def formula(page, name, *arguments):
    """A function of docs/moving/formulas.js, called in the page."""
    return page.evaluate(f"(given) => FORMULAS.{name}(...given)", list(arguments))


def symbols(ranks, words, script="train_mp.py"):
    options = SCRIPTS[script]
    config = load_config(words.split(), None, ranks, options.yaml_config, options.splits)
    return Symbols(config, config.layout(ranks, 4), 0)


@pytest.mark.slow("a browser takes seconds to start")
def test_messages_and_buckets_are_those_of_the_planner(page):
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        for ranks in (2, 4, 8):
            assert formula(page, "bytesSent", kind, 960, ranks) == bytes_sent(kind, 960, ranks)
    for cap in (1, 5, 25):
        s = symbols(8, f"--config=mp --data_parallel=ddp --bucket_cap_mb={cap} --tensor_parallel=2")
        ((message, count),) = [each for each in messages(s).counted.items() if each[0].group == "dp"]
        assert formula(page, "buckets", s.parameters, cap) == count
        given = {"parameters": s.parameters, "capMib": cap, "ranks": 4, "backward": 100, "latency": 0.3, "speed": 8}
        shown = formula(page, "overlap", given)
        assert len(shown["buckets"]) == count
        assert formula(page, "bytesSent", "all_reduce", shown["size"], 4) == pytest.approx(message.sent, rel=1e-6)


@pytest.mark.slow("a browser takes seconds to start")
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_units_that_are_held_are_those_of_the_planner(page, strategy):
    s = symbols(4, f"--config=quick --data_parallel={strategy}", "train.py")
    gathered = formula(page, "gathered", s.L, strategy)
    assert max(gathered) * s.block + s.rest == pytest.approx(buffer_bytes(s) / s.gathered_bytes)


@pytest.mark.slow("a browser takes seconds to start")
def test_a_pipeline_waits_as_long_as_its_formula_says(page):
    for stages, parts in ((2, 4), (4, 8), (4, 32), (3, 1), (6, 12)):
        bubble = formula(page, "bubble", stages, parts)
        assert bubble == pytest.approx((stages - 1) / (parts + stages - 1))
        for schedule in ("gpipe", "1f1b"):
            rows = formula(page, "pipeline", stages, parts, schedule)
            slots = 1 + max(each["slot"] for row in rows for each in row)
            assert 1 - 2 * parts / slots == pytest.approx(bubble)
            assert {len(row) for row in rows} == {2 * parts}
            order = [(each["part"], each["backward"]) for each in rows[0]]
            kept = [sum(-1 if back else 1 for _, back in order[:n]) for n in range(1, len(order) + 1)]
            assert max(kept) == (parts if schedule == "gpipe" else min(stages, parts))


@pytest.mark.slow("a browser takes seconds to start")
def test_collectives_rings_and_exposed_time_are_those_of_the_exercises(page):
    solved = importlib.import_module("exercises.solutions.15_collectives")
    reading = importlib.import_module("exercises.solutions.10_read_a_trace")
    draw = random.Random(3)
    for ranks in (2, 3, 4):
        before = [[draw.randrange(100) for _ in range(2 * ranks)] for _ in range(ranks)]
        for kind in COLLECTIVES:
            after = getattr(solved, kind)(before)
            assert formula(page, "collective", kind, before) == after
            # Changing a number that is not needed changes nothing, and one that is needed does.
            for place in range(2 * ranks):
                other = [list(numbers) for numbers in before]
                other[ranks - 1][place] += 1000
                changes = getattr(solved, kind)(other)[0] != after[0]
                needed = formula(page, "needed", kind, ranks - 1, 0, ranks, 2 * ranks)
                assert (place in needed) == changes, (kind, place)
        square = [numbers[:ranks] for numbers in before]
        ended = formula(page, "ring", square, 2 * (ranks - 1))["chunks"]
        assert ended == solved.all_reduce(square)
        half = formula(page, "ring", square, ranks - 1)["chunks"]
        for rank in range(ranks):
            whole = (rank + 1) % ranks
            assert half[rank][whole] == ended[0][whole]
    work = sorted([draw.uniform(0, 90), draw.uniform(0, 90)] for _ in range(6))
    work = [sorted(each) for each in work]
    compute = [("work", *each) for each in work]
    assert formula(page, "exposed", 20, 80, work) == pytest.approx(reading.exposed(20, 80, compute))


@pytest.mark.slow("a browser takes seconds to start")
def test_split_products_attention_and_halos_are_those_of_one_device(page):
    torch.manual_seed(0)
    x, a, b, grad = (torch.randint(-2, 3, shape).double() for shape in ((2, 4), (4, 4), (4, 4), (2, 4)))
    for each in (x, a, b):
        each.requires_grad_()
    y = x @ a @ b
    y.backward(grad)
    shown = formula(page, "tensorParallel", *(each.detach().tolist() for each in (x, a, b, grad)))
    assert shown["y"] == y.tolist() and shown["xGrad"] == x.grad.tolist()
    a_grad = torch.cat([torch.tensor(rank["aGrad"]) for rank in shown["ranks"]], 1)
    b_grad = torch.cat([torch.tensor(rank["bGrad"]) for rank in shown["ranks"]], 0)
    assert a_grad.tolist() == a.grad.tolist() and b_grad.tolist() == b.grad.tolist()

    merge = importlib.import_module("exercises.solutions.07_merge_attention").merge
    scores, values = torch.randn(4, 3, dtype=torch.double), torch.randn(4, 3, dtype=torch.double)
    state = None
    merged = (torch.zeros(1, 1, 1, dtype=torch.double), torch.full((1, 1), -torch.inf, dtype=torch.double))
    for block in range(4):
        state = formula(page, "attend", state, scores[block].tolist(), values[block].tolist())
        out = (scores[block].softmax(0) @ values[block])[None, None, None]
        lse = scores[block].logsumexp(0)[None, None]
        merged = merge(*merged, out, lse)
        assert state["out"] == pytest.approx(merged[0].item())
        assert state["top"] + torch.tensor(state["sum"]).log().item() == pytest.approx(merged[1].item(), rel=1e-6)

    bands, grads = [[2, 0, 1, 3], [1, 4, 0, 2], [3, 1, 2]], [[1, 1, 0, 2], [0, 1, 2, 1], [1, 0, 1]]
    rows = torch.tensor([*chain(*bands)], dtype=torch.double, requires_grad=True)
    out = F.conv1d(rows[None, None], torch.ones(1, 1, 3, dtype=torch.double), padding=1)[0, 0]
    out.backward(torch.tensor([*chain(*grads)], dtype=torch.double))
    ranks = formula(page, "halo", bands, grads)
    assert [*chain(*(rank["outputs"] for rank in ranks))] == out.tolist()
    assert [*chain(*(rank["grad"] for rank in ranks))] == rows.grad.tolist()


@pytest.mark.slow("a browser takes seconds to start")
def test_the_score_of_the_page_is_that_of_training(page):
    draw = random.Random(5)
    for count in (2, 3, 6):
        members = [draw.uniform(-3, 3) for _ in range(count)]
        truth = draw.uniform(-3, 3)
        given = torch.tensor(members, dtype=torch.double)[None, :, None]
        wanted = crps_of_points(given, torch.tensor([[truth]], dtype=torch.double), 1).item()
        assert formula(page, "crps", members, truth)["crps"] == pytest.approx(wanted)


def test_traces_of_the_page_are_those_that_are_stored():
    ranks = traces()
    assert [each["rank"] for each in ranks] == [0, 1]
    for each in ranks:
        names = [name for name, *_ in each["ranges"]]
        assert names == ["data", "forward", "backward", "reduce", "optimizer"] * 2
        assert len(each["messages"]) == 14
        work = each["work"]
        assert all(end <= start for (_, end), (start, _) in pairwise(work))
