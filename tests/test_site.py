"""The front door: README is short, lessons are lessons, drawings are made by their code, and the site is whole.

The page to play with shows what the planner says, to those who use a keyboard and a narrow screen too.
"""

import ast
import difflib
import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from latex2mathml.converter import convert

from docs import explorer_data
from docs.drawings.__main__ import DRAWINGS, FOLDER, NARROW, drawings
from docs.narrow import fit_narrow
from docs.site_hooks import MOVING
from docs.site_links import lost_links
from docs.typeset import INLINE
from tests.support.browser import MISPLACED, open_chromium
from tools.planner.hardware import load_gpu
from tools.planner.plan import plan_layout
from tools.planner.textbook import textbook_traces
from utils.config import SCRIPTS, load_config

pytestmark = pytest.mark.timeout(900)  # the first test builds the site

ROOT = Path(__file__).parents[1]
LESSONS = ["one_device", "data_parallel", "model_parallel", "domain_parallel"]
PAGES = sorted([ROOT / "README.md", ROOT / "exercises/README.md", *ROOT.glob("docs/**/*.md")])
HEADINGS = ["The idea", "The code", "Run it here", "Run it on Slurm", "What you should see", "What goes wrong"]
HEADINGS += ["Exercises", "Questions"]


def words(page):
    return len(re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S).split())


def test_readme_is_read_in_a_minute_and_has_no_marks_of_programs():
    assert words(ROOT / "README.md") <= 1300
    assert "<!--" not in (ROOT / "README.md").read_text()


def test_what_readme_says_of_the_ladders_lines_is_so():
    """Lines of code that are new and that are gone, from rung to rung, without docstrings."""
    codes = [
        ast.unparse(without_docstring(ROOT / name)).splitlines()
        for name in ("train.py", "train_mp.py", "train_shard.py")
    ]
    counts = []
    for before, after in pairwise(codes):
        changed = [line[0] for line in difflib.ndiff(before, after) if line[0] in "+-"]
        counts.append((changed.count("+"), changed.count("-")))
    assert counts == [(4, 2), (3, 3)]
    assert (
        "two lines more and two changed, and `train_shard.py` changes three lines" in (ROOT / "README.md").read_text()
    )


def without_docstring(file):
    tree = ast.parse(file.read_text())
    del tree.body[0]
    return tree


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_short_has_its_parts_and_its_reference(name):
    page = ROOT / f"docs/{name}.md"
    text = page.read_text()
    assert words(page) <= 2500
    assert [line[3:] for line in text.splitlines() if line.startswith("## ") and line[3:] in HEADINGS] == HEADINGS
    assert f"](reference/{name}.md" in text and (ROOT / f"docs/reference/{name}.md").exists()
    assert "images/drawings/" in text and "predict" in text


def test_numbers_worked_into_formulas_are_right():
    """The parts of each equation that have no letters are equal, to their three digits; of a definition all have."""
    formulas = [
        text for page in ROOT.glob("docs/**/*.md") for text in re.findall(r"^\$\$\n(.*)\n\$\$$", page.read_text(), re.M)
    ]
    worked = 0
    for formula in formulas:
        code = re.sub(r"\\dfrac\{(.*?)\}\{(.*?)\}", r"(\1)/(\2)", re.sub(r"\\;\\mathrm\{\w+\}", "", formula))
        parts = [part.replace(r"\times", "*").replace("^", "**") for part in code.split("=")]
        numbers = [eval(part) for part in parts if not re.search("[a-zA-Z]", part)]
        worked += len(numbers) >= 2
        assert len(numbers) != 1 and numbers == pytest.approx(numbers[-1:] * len(numbers), rel=5e-3), formula
    assert worked >= 6


# Fractions with letters, powers, products with a difference: 2 (n-1)/n N D, 12 D², 1/N, M (M - 1).
PLAIN_FORMULA = r"\([A-Za-z] ?- ?1\)|[A-Za-z][²³]|\b[A-Z]\^\d|\b\d*[A-Z]/[A-Z]\b|(?<![\w/])\d+/[A-Zcknt]\b|\bsqrt\("


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_formulas_in_sentences_are_typeset(page):
    """None is left as plain text, and those that are there become MathML."""
    text = page.read_text()
    for found in INLINE.finditer(text):
        if found["tex"]:
            formula = ElementTree.fromstring(convert(found["tex"]))
            words = "".join(formula.itertext())
            assert formula.tag.endswith("math") and "\\" not in words, found[0]
    without = re.sub(r"^\$\$\n.*?^\$\$$", "", INLINE.sub("", text), flags=re.S | re.M)
    assert re.findall(PLAIN_FORMULA, without) == []


def test_a_plain_formula_is_found_and_code_is_none():
    for text in ("it sends 2 (n-1)/n N D", "12 D² weights", "8P/N", "1/N of it", "M (M - 1)", "4 sqrt(H W / n)"):
        assert re.search(PLAIN_FORMULA, text), text
    text = "`a$b$` and $2n$\n\n```bash\n$x$\n```\n\n    echo $A$B\n"
    assert [found["tex"] for found in INLINE.finditer(text) if found["tex"]] == ["2n"]


def test_drawings_are_those_of_their_code_and_each_is_shown():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    assert len(DRAWINGS) >= 12
    drawn = drawings()
    assert {file.stem for file in FOLDER.glob("*.svg")} == set(drawn)
    assert {draw.__name__ for draw in NARROW} == {draw.__name__ for draw in DRAWINGS} - set(MOVING)
    for name, drawing in drawn.items():
        text = (FOLDER / f"{name}.svg").read_text()
        assert text == drawing.svg(), f"make drawings: {name}"
        assert f"images/drawings/{name.removesuffix('_narrow')}.svg" in pages, name
        ElementTree.fromstring(text)
        assert "prefers-color-scheme: dark" in text and "href=" not in text


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make site` builds it: a warning of a lost link or anchor is an error."""
    pytest.importorskip("mkdocs", reason="pip install -r requirements/site.txt")
    folder = tmp_path_factory.mktemp("site").resolve()
    line = re.search(r"^site:.*\n\t(.*mkdocs build.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    build = ["bash", "-c", line.replace("$(PY)", sys.executable) + f" --site-dir {folder}"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow("building the site takes seconds")
def test_the_site_holds_every_page_and_needs_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert {page.stem for page in ROOT.glob("docs/*.md")} <= {page.stem for page in pages}
    assert (site / "code/training/step/step.py.html").exists()
    for page in pages:
        text = page.read_text()
        assert not re.search(r"<(script|link|img|iframe)\b[^>]*(src|href)=\"?(https?:)?//", text), page
        assert "[[[cog" not in text, page
        assert not re.search(r">\s*\|", re.sub(r"<(code|script|style)\b.*?</\1>", "", text, flags=re.S)), (
            f"{page}: a raw table"
        )
        assert not re.search(r"<p>\s*(torchrun|sbatch|python|make) ", text), f"{page}: a command is no paragraph"
    lesson = (site / "data_parallel.html").read_text()
    assert lesson.count('<p class="formula"><math') == 3 and "$$" not in lesson  # formulas of their own
    assert lesson.count('<span class="formula"><math') >= 25
    for page in pages:
        words_of_page = re.sub(r"<(code|script|style|math)\b.*?</\1>", "", page.read_text(), flags=re.S)
        assert "code/" in str(page) or not re.search(r"\$[^$\s<][^$<]*\$", words_of_page), f"{page}: a raw formula"
    assert "Run it on Slurm</label>" in lesson  # a tab
    assert "does each of four ranks hold under\n<code>ddp</code>?</summary>" in lesson
    for page in pages:
        summaries = re.findall("<summary>(.*?)</summary>", page.read_text(), re.S)
        assert "code/" in str(page) or not [each for each in summaries if "`" in each], page
    assert 'href="code/distributed/data_parallel.py.html"' in lesson
    assert len(re.findall(r'<abbr title="[^"]+" tabindex="?0"?>all-reduce', lesson)) == 1
    assert "<abbr" not in (site / "glossary.html").read_text()
    home = (site / "index.html").read_text()
    assert (
        home.index("Train one model") < home.index(".webp") < home.index('href="explorer.html">Try') < home.index("<h2")
    )
    sizes = {file: file.stat().st_size for file in site.rglob("*") if file.is_file()}
    assert sum(sizes.values()) <= 16e6
    for page in pages:
        needed = re.findall(r'<(?:script|link|img|source)\b[^>]*?\b(?:src|href)="([^"#:]+)"', page.read_text())
        loaded = {(page.parent / path).resolve() for path in needed} & sizes.keys()
        assert sizes[page] + sum(sizes[file] for file in loaded) <= 3e6, page
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    assert found and not [entry["location"] for entry in found if entry["location"].startswith("code/")]


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    """And it is an error of a strict build, since that counts the warnings of the hook."""
    (tmp_path / "b.html").write_text('<h2 id="here">x</h2>')
    (tmp_path / "404.html").write_text('<a href="/nowhere.html">x</a>')
    page = tmp_path / "a.html"
    page.write_text('<a href="b.html#here">x</a><a href="#tp=2">x</a><a href="https://x.org/y">x</a><img src="b.html">')
    assert lost_links(tmp_path) == []
    page.write_text('<a href="b.html#there">x</a><a href="#here">x</a><script src="c.js">"<a href=\'d\'>"</script>')
    assert [line.split(" ")[3] for line in lost_links(tmp_path)] == ["#here", "b.html#there", "c.js"]
    build = re.search(r"mkdocs build.*", (ROOT / "Makefile").read_text())[0]
    assert "--strict" in build and "--quiet" not in build  # which counts no warnings


def test_words_of_code_stay_whole_and_cells_of_words_have_room():
    content = "<pre><code>a -b</code></pre><code>train.py --a_b=1 c</code><td>short</td><td>" + "word " * 9 + "</td>"
    made = fit_narrow(content, ROOT / "docs")
    assert made.startswith("<pre><code>a -b</code></pre>")
    assert '<code>train.py <span class="whole">--a_b=1</span> c</code><td>short</td><td class="words">' in made
    block = '<div class="highlight"><pre><code>{}<span class="w"> </span>--num_iters 2</code></pre></div>'
    broken = fit_narrow(block.format("torchrun"), ROOT / "docs")
    assert broken.startswith('<div class="highlight commands">')
    assert '</span><span class="whole">--num_iters</span> 2' in broken
    assert fit_narrow(block.format("x = 1"), ROOT / "docs") == block.format("x = 1")
    plot = '<p><img alt="of it" src="images/memory_quick_cpu.png" /></p>'
    assert 'style="--least: 960px"' in fit_narrow(plot, ROOT / "docs")


@pytest.mark.slow("a browser takes seconds to start")
def test_a_link_to_a_tab_shows_it(site, browser):
    page = browser.new_page()
    page.goto(f"file://{site}/launch.html")
    page.locator("a[href='scaling.html#run-it-on-slurm']").click()
    page.wait_for_url("**/scaling.html#*")
    assert page.locator("#run-it-on-slurm").locator("xpath=ancestor::div[1]").is_visible()


@pytest.fixture(scope="module")
def browser():
    with open_chromium() as opened:
        yield opened


# Words of code that are broken, columns of words that hold a letter a line, plots whose type is too small on a phone,
# and buttons over code.
NOT_READ = """[...document.querySelectorAll(".md-typeset .whole, .md-typeset th code")]
    .filter(each => each.getClientRects().length > 1).map(each => each.textContent)
    .concat([...document.querySelectorAll("td.words")].filter(each => each.clientWidth < 80)
        .map(each => each.textContent))
    .concat([...document.querySelectorAll(".plot img")]
        .filter(each => innerWidth < 700 && each.clientWidth < 0.79 * each.naturalWidth).map(each => each.src))
    .concat([...document.querySelectorAll(".commands code")].filter(each => each.scrollWidth > each.clientWidth + 1)
        .map(each => each.textContent))
    .concat([...document.querySelectorAll(".highlight > pre")].filter(each => each.querySelector(".md-code__nav")
        && each.querySelector("code").getBoundingClientRect().right
            > each.querySelector(".md-code__nav").getBoundingClientRect().left).map(each => each.textContent))"""


@pytest.mark.slow("a browser takes seconds to start")
def test_pages_fit_on_wide_and_narrow_screens(site, browser, tmp_path_factory):
    """Nothing is cut off or has to be scrolled sideways; pictures of six pages lie in the temporary folder."""
    pictures = tmp_path_factory.mktemp("pictures")
    for width, scheme in ((1300, "light"), (400, "dark")):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        asked: list[str] = []
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        for name in ("index", *LESSONS, "explorer"):
            page.goto(f"file://{site}/{name}.html")
            page.screenshot(path=pictures / f"{name}_{width}.png")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            broken = "[...document.images].filter(each => each.complete && !each.naturalWidth).map(each => each.src)"
            assert page.evaluate(broken) == []
            assert page.evaluate(NOT_READ) == [], (name, width)
        assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
    assert len(list(pictures.iterdir())) == 12


@pytest.mark.slow("a browser takes seconds to start")
def test_drawings_have_captions_and_readable_type_on_a_phone(site, browser):
    page = browser.new_page(viewport={"width": 400, "height": 900})
    moving = set()
    narrow = set()
    pages = [file for file in site.rglob("*.html") if 'class="drawing"' in file.read_text()]
    assert len(pages) >= 9
    for file in pages:
        page.goto(file.as_uri())
        figures = page.locator("figure.drawing").all()
        assert figures, file
        for figure in figures:
            assert len(figure.locator("figcaption").inner_text()) > 10
            if figure.get_attribute("data-picture"):
                moving.add(figure.get_attribute("data-picture"))
                assert figure.locator("[role=group] svg").is_visible() and not figure.locator("img").is_visible()
                continue
            # The narrow drawing is shown whole, and its type is at least 11 px.
            image = figure.locator("img")
            drawn = FOLDER / Path(image.evaluate("each => each.currentSrc")).name
            narrow.add(drawn.stem.removesuffix("_narrow"))
            width = int(re.search(r' width="(\d+)"', drawn.read_text())[1])
            shown = image.bounding_box()
            assert drawn.stem.endswith("_narrow") and shown["x"] + shown["width"] <= 400, drawn.name
            sizes = map(int, re.findall(r'font-size="(\d+)"', drawn.read_text()))
            assert min(sizes) * shown["width"] / width >= 11, drawn.name
    assert moving == set(MOVING) and narrow == {draw.__name__ for draw in NARROW}


@pytest.mark.slow("a browser takes seconds to start")
def test_search_works_from_a_file_and_answers_wait_for_a_question(site, browser):
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto(f"file://{site}/ranks_and_collectives.html")
    page.fill("input.md-search__input", "halo")
    page.focus("input.md-search__input")
    page.wait_for_selector(".md-search-result__item")
    page.goto(f"file://{site}/ranks_and_collectives.html")
    assert page.locator("details.predict").count() >= 2
    assert not page.locator("details.predict").first.is_visible()
    page.locator("form.predict input").first.fill("320")
    page.locator("form.predict button").first.click()
    assert page.locator("form.predict [role=status]").first.inner_text() == "Right."
    assert page.locator("details.predict").first.get_by_text("8 x 40 MB").is_visible()


@pytest.mark.slow("a browser takes seconds to start")
def test_a_trace_is_zoomed_by_keyboard_and_asks_which_message_is_exposed(site, browser):
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto(f"file://{site}/profiling.html")
    viewer = page.locator("#viewer")
    before = viewer.locator("svg text").all_inner_texts()
    viewer.focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert viewer.locator("svg text").all_inner_texts() != before
    viewer.get_by_role("button", name="all of it").click()
    assert viewer.locator("svg text").all_inner_texts() == before
    viewer.get_by_label("message 2 of rank 1", exact=True).press("Enter")
    assert "Yes, the longest. It waits for rank 0" in viewer.inner_text()
    viewer.get_by_label("message 14 of rank 1", exact=True).press("Enter")
    assert "Not the longest" in viewer.inner_text()


@pytest.mark.slow("a browser takes seconds to start")
def test_the_address_keeps_a_layout_and_the_list_names_some(site, browser):
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto(f"file://{site}/explorer.html")
    page.select_option("[name=gpu]", "h100")
    number_of_gpus(page, 4)
    page.select_option("[name=tp]", "2")
    verdict, line = page.inner_text("#verdict"), page.inner_text("#line")
    address = page.url
    assert "gpu=h100&" in address and "&n=4&" in address and "&tp=2&" in address
    page.goto("about:blank")
    page.goto(address)
    assert (page.inner_text("#verdict"), page.inner_text("#line")) == (verdict, line)

    presets = re.findall(r'href="#([\w-]+)" data-preset="([^"]+)"', (ROOT / "docs/explorer.md").read_text())
    assert len(presets) >= 4
    lessons = "".join((ROOT / f"docs/{name}.md").read_text() for name in LESSONS)
    names = [re.split("[ :]", model)[0] for model in explorer_data.MODELS]  # in an address
    assert len(set(names)) == len(names)
    assert sum(f"explorer.md#{name})" in lessons for name, _ in presets) >= 3
    for name, words in presets:
        page.goto("about:blank")
        page.goto(f"file://{site}/explorer.html#{name}")
        choices = dict(each.split("=") for each in words.split("&"))
        for field, value in choices.items():
            assert re.split("[ :]", page.input_value(f"[name={field}]"))[0] == value, (name, field)


@pytest.mark.slow("a browser takes seconds to start")
def test_no_words_of_a_drawing_leave_their_box_or_touch_others(browser):
    page = browser.new_page(viewport={"width": 820, "height": 640})
    for file in sorted(FOLDER.glob("*.svg")):
        page.goto(file.as_uri())
        assert page.evaluate(f"({MISPLACED})(document.documentElement)") == [], file.name


def number_of_gpus(page, count):
    page.fill("[name=n]", str(count))
    page.press("[name=n]", "Tab")


SPLIT_BY_MP = SCRIPTS["train_mp.py"].splits
CUT_OFF = """[...document.querySelectorAll("#explorer table, #explorer form, #ranks")]
    .filter(each => each.getBoundingClientRect().right > innerWidth || each.scrollWidth > each.clientWidth + 1)
    .map(each => each.id)"""


@pytest.mark.slow("a browser takes seconds to start")
def test_where_colours_run_out_the_partners_of_a_rank_are_named(site, browser):
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto(f"file://{site}/explorer.html")
    assert page.inner_text("#repeated") == ""
    page.select_option("[name=batch]", "256 samples")
    number_of_gpus(page, 1024)
    for name, value in (("tp", "8"), ("domain", "1x1")):
        page.select_option(f"[name={name}]", value)
    page.click("#by button:text('tp')")
    page.click("[data-rank='9']")
    assert page.locator("[role=gridcell]").count() == 1024 and page.locator(".mine").count() == 8
    first = " ".join(map(str, range(1, 106, 8)))
    assert f"dp 1 of 128, with {first} ... 1017 (128 ranks)" in page.inner_text("#partners")
    repeated = "128 groups of tp and 8 colours: rank 9 works only with 8 9 10 11 12 13 14 15"
    assert repeated in page.inner_text("#repeated")
    assert page.evaluate(CUT_OFF) == []


@pytest.mark.slow("a browser takes seconds to start")
def test_the_page_to_play_with_answers_to_pointer_and_keyboard(site, browser):
    page = browser.new_page(viewport={"width": 400, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"file://{site}/explorer.html")
    assert page.locator("[role=gridcell]").count() == 8

    number_of_gpus(page, 4)
    page.click("[name=keep]")
    page.select_option("[name=tp]", "2")
    beside = page.locator("#beside .differs", has_text="layout").inner_text()
    assert beside.split("\t") == ["layout", "dp 4", "tp 2 x dp 2"]
    assert "tp 0 of 2, with 0 1; dp 0 of 2, with 0 2" in page.inner_text("#partners")
    page.focus("[data-rank='0']")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#partners").startswith("Rank 1: tp 1 of 2, with 0 1; dp 0 of 2, with 1 3")
    assert page.evaluate("document.activeElement.dataset.rank") == "1"
    assert page.locator("[name=domain] option[value='2x1']").is_disabled() is False
    page.select_option("[name=cp]", "2")
    refused = page.locator("[name=domain] option[value='2x1']")
    reason = "4 ranks cannot be split as tp 2 x cp 2 x domain 2 x dp: 4 is not a multiple of 8"
    assert refused.is_disabled() and refused.get_attribute("title") == reason
    page.click("summary:text('Why some choices are grey')")
    assert f"domain 2x1: {reason}" in page.inner_text("#why")

    command = page.inner_text("#line").split(" ", 3)
    assert command[0] == "torchrun" and command[2] == "train_mp.py"
    config = load_config(shlex.split(command[3]), world_size=4, splits=SPLIT_BY_MP)
    assert (config.tensor_parallel, config.context_parallel, config.embed_dim) == (2, 2, 1024)
    gpu = load_gpu("a100-40gb")
    layout = config.layout(4, gpu.gpus_per_node)
    plan = plan_layout(config, layout, gpu, textbook_traces(config, layout))
    assert f"about {1e3 * plan.time.seconds:.3g} ms, give or take 35 %" in page.inner_text("#verdict")
    assert f"{plan.memory['parameters'] / 2**30:.2f}".rstrip("0") in page.inner_text("#held")

    page.select_option("[name=parts]", "4")
    page.select_option("[name=again]", "full")
    page.select_option("[name=batch]", "256 samples")
    config = load_config(shlex.split(page.inner_text("#line").split(" ", 3)[3]), world_size=4, splits=SPLIT_BY_MP)
    found = config.global_batch_size, config.gradient_accumulation, config.activation_checkpointing
    assert found == (256, 4, "full")
    assert page.evaluate(CUT_OFF) == []

    page.select_option("[name=model]", list(explorer_data.MODELS)[-1])  # the largest model on one GPU
    number_of_gpus(page, 1)
    page.select_option("[name=again]", "none")
    assert re.match(r"Nothing fits; this layout needs [\d.]+ of 39\.4 GiB\.", page.inner_text("#verdict"))
    page.click("[name=best]")
    assert re.match(r"Nothing fits; this layout needs least: [\d.]+ of 39\.4 GiB\.", page.inner_text("#verdict"))
    number_of_gpus(page, 24)  # that divide, where their product with the others does
    page.select_option("[name=tp]", "8")
    page.click("[name=best]")
    assert page.inner_text("#verdict").startswith(("It fits", "It just fits"))
    number_of_gpus(page, 37)
    assert page.inner_text("#verdict").startswith("No layout: global_batch_size 256 cannot be shared by 37 ranks")
    assert not page.locator("#ranks").is_visible()
    number_of_gpus(page, 8)
    assert page.locator("#ranks").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert errors == []
