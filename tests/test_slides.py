"""Slides: made of the lessons' own parts, as long as the timetable says, and readable on a projector."""

import re
from pathlib import Path

import pytest

from docs.slides.deck import HERE, deck_as_html, read_deck
from docs.slides.pages import paragraph_of, read_sections, title_of_exercise, without_pointers
from tests.support.browser import open_chromium
from tools.course.timetable import PAGE, minutes_of
from utils.errors import UsageError
from utils.yaml_files import parse_yaml

ROOT = Path(__file__).parents[1]
PLANS = sorted(HERE.glob("*.yml"))
PATIENCE = 200_000  # ms for a page to load on cores that others use
SMALLEST = 15  # px of type on a slide of 1280 x 720
# What leaves its slide, or the part of it between heading and foot; type that is too small. slide: the element.
FAULTS = f"""(slide) => {{
    const body = slide.querySelector(".body"), found = []
    const frame = slide.getBoundingClientRect(), room = body.getBoundingClientRect()
    const outside = (at, box) => at.left < box.left - 1 || at.right > box.right + 1
        || at.top < box.top - 1 || at.bottom > box.bottom + 1
    for (const each of slide.querySelectorAll("h2, footer")) {{
        if (outside(each.getBoundingClientRect(), frame)) found.push(each.textContent)
    }}
    if (slide.querySelector("h2").getBoundingClientRect().bottom > room.top + 1) found.push("the heading")
    const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT)
    while (walker.nextNode()) {{
        const range = document.createRange()
        range.selectNodeContents(walker.currentNode)
        const words = walker.currentNode.textContent.trim()
        if (!words) continue
        for (const at of range.getClientRects()) if (outside(at, room)) found.push(words)
        const size = parseFloat(getComputedStyle(walker.currentNode.parentElement).fontSize)
        if (size < {SMALLEST}) found.push(`${{size}} px: ${{words}}`)
    }}
    for (const each of body.querySelectorAll("img, svg")) {{
        const at = each.getBoundingClientRect()
        const isSmall = at.width < 100 || at.height < 15
        if (outside(at, room) || isSmall) found.push("a picture")
        if (each.matches("img") && at.width < 700) found.push(`a picture of ${{at.width}} px`)
    }}
    return [...new Set(found)]
}}"""


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_each_slide_has_notes_and_minutes_that_add_up_to_the_timetable(plan):
    deck = read_deck(plan)
    assert len(deck.slides) >= 8
    for slide in deck.slides:
        assert slide.minutes >= 1 and slide.body.strip()
        assert len(re.sub("<.*?>", "", slide.notes).split()) >= 4, slide.title
    assert deck.minutes == minutes_of(deck.page)
    text = deck_as_html(deck)
    assert not re.search(r"(src|href)=\"(?!data:|#)", text), "something from elsewhere"
    assert "data:image/svg+xml" in text and "prefers-color-scheme" not in text


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_a_slide_holds_no_debris_of_its_page_and_the_exercises_of_the_timetable(plan):
    """No lead whose table is elsewhere, and no sentence that was only a link."""
    deck = read_deck(plan)
    for slide in deck.slides:
        last = re.sub("<.*?>", "", slide.body.strip().splitlines()[-1]).strip()
        assert not last.endswith(":"), (plan.name, slide.title)
        words = re.sub(r"<(pre|table|div|strong)\b.*?</\1>|<.*?>", "", slide.body, flags=re.S)
        short = [each for each in re.split(r"(?<=[.?!:])\s+", words) if 0 < len(each.split()) < 3]
        assert not [each for each in short if each[0].isupper() and each.endswith(".")], (plan.name, slide.title)
        assert "()" not in words and "Predict first" not in slide.body
    (row,) = re.findall(rf"^\| \d+:\d\d \| \d+ \| \[[^|]+\]\({deck.page}\).*$", PAGE.read_text(), re.M)
    (shown,) = [entry["exercises"] for entry in parse_yaml(plan.read_text())["slides"] if "exercises" in entry]
    assert [str(number) for number in shown] == re.findall(r"exercise (\d+)", row)


def test_there_are_decks_of_all_rungs_and_the_timetable_has_no_gap():
    pages = {read_deck(plan).page for plan in PLANS}
    assert {"one_device.md", "data_parallel.md", "model_parallel.md", "domain_parallel.md"} < pages
    assert "ranks_and_collectives.md" in pages and minutes_of("ranks_and_collectives.md") == 30
    days = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    days = [day for day in days if day.startswith(("Half a day", "A full day"))]
    assert len(days) == 2
    for day in days:
        rows = [list(map(int, row)) for row in re.findall(r"^\| (\d+):(\d\d) \| (\d+) \|", day, re.M)]
        ends = 0
        for hours, minutes, lasts in rows:
            assert 60 * hours + minutes == ends
            ends += lasts
        assert ends == 240


def test_words_of_slides_are_those_of_the_lesson(tmp_path):
    """A changed lesson has changed slides, and one that lost a part is named."""
    page = tmp_path / "lesson.md"
    page.write_text(
        "# A lesson\n\nFirst. Second one. Third.\n\n## The `idea`\n\n```python\n# no heading\nx = 1\n```\n"
        "<!--[[[cog x ]]]-->\n| a | b |\n|---|---|\n| 1 | 2 |\n\n$$\nx^2\n$$\n\n- one\n  more\n- two\n\n"
        '![of it](images/drawings/halo.svg)\n\n<details class="predict"><summary>Why?</summary>\nSo.\n</details>\n'
    )
    sections = read_sections("lesson.md", tmp_path)
    assert list(sections) == ["a-lesson", "the-idea"]
    assert sections["a-lesson"].find("text 1/2-3").text == "Second one. Third."
    idea = sections["the-idea"]
    assert [part.kind for part in idea.parts] == ["code", "table", "formula", "list", "picture", "question"]
    assert idea.find("picture halo").text.startswith("![of it]") and "# no heading" in idea.find("code").text
    for wanted in ("table 2", "picture ring", "text 1", "video 1"):
        with pytest.raises(UsageError, match=f"section 'The idea' has no '{wanted}'"):
            idea.find(wanted)
    pointed = "It costs ([more](x.md)). [More costs](y.md). It is done ([Li 2020](https://z))."
    assert without_pointers(pointed) == "It costs. It is done ([Li 2020](https://z))."
    with pytest.raises(UsageError, match="no exercise 99"):
        title_of_exercise(99)
    with pytest.raises(UsageError, match="no such sentences"):
        sections["a-lesson"].find("text 1/4-5")
    with pytest.raises(UsageError, match="no paragraph"):
        paragraph_of("lesson.md", "Rung 9.", tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("table 1", "table 9", "has no 'table 9'"),
        ("from: the-idea", "from: the-ides", "the-ides"),
        ("minutes:", "minuets:", "did you mean 'minutes'"),
        ("page:", "page: [", "line "),
    ],
)
def test_a_deck_that_is_wrong_says_where(tmp_path, old, new, said):
    text = PLANS[0].read_text()
    assert old in text
    (tmp_path / "deck.yml").write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match=f"deck.yml.*{re.escape(said)}"):
        read_deck(tmp_path / "deck.yml")


@pytest.fixture(scope="module")
def browser():
    with open_chromium() as opened:
        yield opened


@pytest.mark.slow("a browser takes seconds to start")
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_nothing_leaves_its_slide_and_type_is_readable(browser, tmp_path, plan):
    file = tmp_path / "deck.html"
    file.write_text(deck_as_html(read_deck(plan)))
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri(), timeout=PATIENCE)
    count = page.locator(".slide").count()
    for number in range(1, count + 1):
        shown = page.locator(".slide.now")
        assert shown.get_attribute("aria-label").startswith(f"{number} of {count}: ")
        assert shown.evaluate(FAULTS) == [], (plan.name, number)
        page.keyboard.press("ArrowRight")
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]
    page.close()


@pytest.mark.slow("a browser takes seconds to start")
def test_slides_go_by_keyboard_have_notes_and_are_pages_on_paper(browser, tmp_path):
    file = tmp_path / "deck.html"
    deck = read_deck(PLANS[0])
    file.write_text(deck_as_html(deck))
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(file.as_uri(), timeout=PATIENCE)
    count = len(deck.slides)
    for key, number in (("End", count), ("ArrowRight", count), ("Home", 1), ("Space", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        assert page.evaluate("location.hash") == f"#{number}"  # page.url follows later
        assert page.locator(".slide.now").count() == 1
    notes = page.locator(".slide.now .notes")
    assert not notes.is_visible()
    page.keyboard.press("n")
    assert notes.is_visible() and notes.bounding_box()["y"] + notes.bounding_box()["height"] <= 721
    with page.expect_popup() as opened:
        page.keyboard.press("p")
    second = opened.value
    second.wait_for_load_state()
    page.keyboard.press("ArrowRight")
    second.wait_for_url("**#2")
    second.close()
    pdf = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == count
    page.close()
