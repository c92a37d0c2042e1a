"""The front door: README is short, lessons are lessons, drawings are made by their code, and the site is whole."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.drawings.__main__ import DRAWINGS, FOLDER

ROOT = Path(__file__).parents[1]
LESSONS = ["one_device", "data_parallel", "model_parallel", "domain_parallel"]
HEADINGS = ["The idea", "The code", "Run it here", "Run it on Slurm", "What you should see", "What goes wrong"]
HEADINGS += ["Exercises", "Questions"]


def words(page):
    return len(re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S).split())


def test_readme_is_read_in_a_minute_and_has_no_marks_of_programs():
    assert words(ROOT / "README.md") <= 1300
    assert "<!--" not in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_short_has_its_parts_and_its_reference(name):
    page = ROOT / f"docs/{name}.md"
    text = page.read_text()
    assert words(page) <= 2500
    assert [line[3:] for line in text.splitlines() if line.startswith("## ") and line[3:] in HEADINGS] == HEADINGS
    assert f"](reference/{name}.md" in text and (ROOT / f"docs/reference/{name}.md").exists()
    assert "images/drawings/" in text and "predict" in text


def test_drawings_are_those_of_their_code_and_each_is_shown():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    assert len(DRAWINGS) >= 12
    assert {file.stem for file in FOLDER.glob("*.svg")} == {draw.__name__ for draw in DRAWINGS}
    for draw in DRAWINGS:
        text = (FOLDER / f"{draw.__name__}.svg").read_text()
        assert text == draw().svg(), f"make drawings: {draw.__name__}"
        assert f"images/drawings/{draw.__name__}.svg" in pages, draw.__name__
        ElementTree.fromstring(text)
        assert "prefers-color-scheme: dark" in text and "href=" not in text


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make site` builds it: a warning of a lost link or anchor is an error."""
    pytest.importorskip("mkdocs", reason="pip install -r requirements-site.txt")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow("building the site takes seconds")
def test_the_site_holds_every_page_and_needs_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert {page.stem for page in ROOT.glob("docs/*.md")} <= {page.stem for page in pages}
    assert (site / "code/training/step.py.html").exists()
    for page in pages:
        text = page.read_text()
        assert not re.search(r"<(script|link|img|iframe)\b[^>]*(src|href)=\"?(https?:)?//", text), page
        assert "[[[cog" not in text, page
    lesson = (site / "data_parallel.html").read_text()
    assert "Run it on Slurm</label>" in lesson  # a tab
    assert 'href="code/distributed/data_parallel.py.html"' in lesson


@pytest.mark.slow("a browser takes seconds to start")
def test_pages_fit_on_wide_and_narrow_screens(site, tmp_path_factory):
    """Nothing is cut off or has to be scrolled sideways; pictures of five pages lie in the temporary folder."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install -r requirements-site.txt")
    chromium = shutil.which("chromium") or pytest.skip("no chromium")
    pictures = tmp_path_factory.mktemp("pictures")
    with api.sync_playwright() as play:
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = play.chromium.launch(executable_path=chromium, args=quiet)
        for width, scheme in ((1300, "light"), (400, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            for name in ("index", *LESSONS):
                page.goto(f"file://{site}/{name}.html")
                page.screenshot(path=pictures / f"{name}_{width}.png")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name
                broken = (
                    "[...document.images].filter(each => each.complete && !each.naturalWidth).map(each => each.src)"
                )
                assert page.evaluate(broken) == []
            assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
        browser.close()
    assert len(list(pictures.iterdir())) == 10
