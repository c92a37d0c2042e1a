"""A browser for tests of pages, and what it can say of words in a drawing."""

import os
import shutil
from contextlib import contextmanager

import pytest

# Words of an SVG that leave the smallest box around them, or touch other words. svg: the element.
MISPLACED = """(svg) => {
    const frame = svg.viewBox.baseVal, found = []
    const boxes = [...svg.querySelectorAll("rect")].map(each => each.getBBox())
        .filter(each => each.width < frame.width || each.height < frame.height)
    const texts = [...svg.querySelectorAll("text")].map(each => [each.textContent, each.getBBox()])
    for (const [words, at] of texts) {
        const right = at.x + at.width, x = at.x + at.width / 2, y = at.y + at.height / 2
        const around = boxes.filter(b => b.x < x && x < b.x + b.width && b.y < y && y < b.y + b.height)
        const box = around.sort((a, b) => a.width * a.height - b.width * b.height)[0] || frame
        if (at.x < box.x - 0.5 || right > box.x + box.width + 0.5) found.push(words)
        for (const [others, b] of texts)
            if (words < others && at.x < b.x + b.width - 1 && b.x < right - 1
                && at.y < b.y + b.height - 3 && b.y < at.y + at.height - 3) found.push(words + " | " + others)
    }
    return found
}"""


@contextmanager
def open_chromium():
    """A headless Chromium of playwright; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install -r requirements/dev.txt")
    chromium = shutil.which("chromium")
    if not chromium and "CI" not in os.environ:
        pytest.skip("no chromium")
    with api.sync_playwright() as play:
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        opened = play.chromium.launch(executable_path=chromium, args=quiet)
        yield opened
        opened.close()
