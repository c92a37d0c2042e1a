"""Hooks of mkdocs (.mkdocs.yml): pages from outside docs/, code as pages, tabs, folds and formulas.

README and a few other pages of the repository lie outside docs/, and chapters link to files of code. Each of them is
a page of the site, so that every link works there as it does in the repository.
"""

import html
import json
import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

from docs import explorer_data, glossary, quiz_page, traces
from docs.code_pages import code_page, stylesheet
from docs.narrow import fit_narrow
from docs.site_links import lost_links
from docs.typeset import typeset_all

ROOT = Path(__file__).parents[1]
LOGGER = logging.getLogger("mkdocs.hooks")
OUTSIDE = {
    "README.md": "index.md",
    "exercises/README.md": "exercises.md",
    "example_logs/README.md": "example_logs.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
}  # the file in the repository and its page
HOME = """\
Train one model on one device or a thousand, with code short enough to read and losses that stay the same.

{animation}

<div class="grid cards" markdown>

- **[Learn](model_and_data.md)**: four rungs from one device to split images, each with a run for a laptop and exercises
- **[Try a layout](explorer.md)**: choose GPUs and how to split the model; memory, messages and time follow
- **[Teach](teaching.md)**: a half-day and a full-day course, with what learners get wrong

</div>
"""  # in place of README's first paragraph and picture
NO_PAGES = ("docs/english/", "docs/slides/")  # folders of docs/ that .mkdocs.yml leaves out
# Drawings that have a picture to step through (docs/moving), which takes their place on the site.
MOVING = (
    "collectives",
    "ring",
    "ddp_buckets",
    "fsdp_units",
    "column_row",
    "ring_attention",
    "pipeline",
    "halo",
    "crps",
)
DRAWING = re.compile(r"^!\[([^\]]+)\]\(((?:[\w./]*/)?images/drawings/(\w+)\.svg)\)$", re.M)
SUMMARY = re.compile(r"<summary>.*?</summary>", re.S)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, and a page for each file of code that a page links to."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    # A copy of the list is walked, since pages of code are added to it. Pages of code link to nothing.
    for file in list(files.documentation_pages()):
        origin = _origin(file.src_uri)
        for target in LINK.findall(file.content_string):
            there = _target(target, origin)
            if there is None:
                continue
            page = _page(there)
            is_code = page.startswith("code/")
            if is_code and not files.get_file_from_path(page):  # another page may have linked to it
                files.append(File.generated(config, page, content=code_page(there, ROOT)))
    files.append(File.generated(config, "code/code.css", content=stylesheet()))
    files.append(File.generated(config, "explorer/constants.js", content=explorer_data.script()))
    files.append(File.generated(config, "moving/traces.js", content=traces.script()))
    files.append(File.generated(config, "moving/search_worker.js", content=_search_worker(config)))
    return files


def on_page_markdown(markdown: str, page: Any, **_given: Any) -> str:
    """Make links lead to pages of the site, fold what is folded, typeset formulas, and show what runs in two tabs."""
    source = page.file.src_uri
    # A blank line takes the place of cog's marks, since a table right behind a block of code would be plain text.
    markdown = re.sub(r"<!--\[\[\[.*?\]\]\]-->\n?", "\n", markdown, flags=re.S)
    markdown = LINK.sub(lambda found: _link(found[0], source), markdown)
    markdown = re.sub(r"<details(?=[ >])", '<details markdown="1"', markdown)
    # Markdown is not read inside a summary.
    markdown = SUMMARY.sub(lambda found: re.sub(r"`([^`]+)`", r"<code>\1</code>", found[0]), markdown)
    if source == "index.md":
        # README begins with its title, a paragraph and a picture.
        title, _, animation, rest = markdown.split("\n\n", 3)
        markdown = "\n\n".join([title, HOME.format(animation=animation), rest])
    markdown = typeset_all(markdown)
    markdown = DRAWING.sub(_figure, markdown)
    # The two sections of a chapter on running it become tabs of one.
    tabs = r"^## (Run it here)\n(.*?)^## (Run it on Slurm)\n(.*?)(?=^## |\Z)"
    return re.sub(tabs, _tabs, markdown, flags=re.S | re.M)


def on_page_content(content: str, page: Any, **_given: Any) -> str:
    """Explain the first use of each term of the glossary, on pages that people read, and insert the questions.

    Words, tables and plots are made to be read on a narrow screen.
    """
    source = page.file.src_uri
    if source != "glossary.md":
        content = quiz_page.insert(glossary.explain(content))
    return fit_narrow(content, ROOT / "docs" / PurePosixPath(source).parent)


def on_post_build(config: Any, **_given: Any) -> None:
    """Write the search index as a script too: a page that is opened from a file can read no other file.

    A link that leads nowhere is a warning, and so an error of a strict build.
    """
    index = Path(config["site_dir"]) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")
    for line in lost_links(Path(config["site_dir"])):
        LOGGER.warning(line)


def _search_worker(config: Any) -> str:
    """The text of the theme's search worker as a script, for docs/moving/offline_search.js."""
    folders = [Path(folder) / "assets/javascripts/workers" for folder in config["theme"].dirs]
    (worker,) = [file for folder in folders for file in folder.glob("search.*.min.js")]
    return f"const SEARCH_WORKER = {json.dumps(worker.read_text())};\n"


def _figure(found: re.Match[str]) -> str:
    """A drawing with its caption, and the name of the picture that moves, or a narrow drawing for a phone."""
    words, path, name = found.groups()
    moving = f' data-picture="{name}"' if name in MOVING else ""
    caption = words[0].upper() + words[1:]
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(words)}">'
    image = f'<img alt="{html.escape(words)}" src="{path}">'
    if not moving:
        narrow = path.replace(".svg", "_narrow.svg")
        image = f'<picture><source media="(max-width: 44.9em)" srcset="{narrow}">{image}</picture>'
    return (
        f'<figure class="drawing"{moving}>{box}{image}</div><figcaption>{html.escape(caption)}.</figcaption></figure>'
    )


def _tabs(found: re.Match[str]) -> str:
    here_title, here, slurm_title, slurm = found.groups()
    tabs = ""
    for title, text in ((here_title, here), (slurm_title, slurm)):
        # Links lead to the sections, as they do in the repository: moving/tabs.js shows the tab.
        lines = text.strip("\n")
        section = f'<a id="{quiz_page.anchor_of(title)}"></a>\n\n{lines}'
        indented = re.sub(r"^(?=.)", "    ", section, flags=re.M)
        tabs += f'=== "{title}"\n\n{indented}\n\n'
    return f"## Run it\n\n{tabs}"


def _origin(page: str) -> Path:
    """The file of the repository that a page of the site is made from."""
    for path, made in OUTSIDE.items():
        if made == page:
            return ROOT / path
    return ROOT / f"docs/{page}"


def _target(target: str, origin: Path) -> str | None:
    """The path in the repository that a link of a file leads to; none if it leads elsewhere."""
    path = target.partition("#")[0]
    if not path or re.match(r"\w+:", path):
        return None
    return (origin.parent / path).resolve().relative_to(ROOT).as_posix()


def _page(path: str) -> str:
    """The page, or the file, of the site for a path of the repository."""
    if (ROOT / path / "README.md").is_file():
        path = f"{path}/README.md"
    if path in OUTSIDE:
        return OUTSIDE[path]
    is_code = path.endswith(".py") or path.startswith(NO_PAGES)
    if path.startswith("docs/") and not is_code:
        return path.removeprefix("docs/")
    return f"code/{path}.html"


def _link(target: str, source: str) -> str:
    path = _target(target, _origin(source))
    if path is None:
        return target
    there = os.path.relpath(_page(path), PurePosixPath(source).parent)
    _, _, anchor = target.partition("#")
    return f"{there}#{anchor}" if anchor else there
