"""Links of a built site that lead nowhere: to a file or to an anchor that is not there."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(r"<(?:a|img|script|link|source|use)\b[^>]*?\b(?:href|src|srcset)=\"([^\"]*)\"")
CODE = re.compile(r"<(script|style)\b[^>]*>.*?</\1>", re.S)
ANCHOR = re.compile(r"\b(?:id|name)=\"([^\"]+)\"")


def lost_links(site: Path) -> list[str]:
    """A line for each link of a page to a file or an anchor of the site that is not there."""
    lost = []
    for page in sorted(site.rglob("*.html")):
        # A server shows this one in any folder, so its links begin at the root.
        if page.name == "404.html":
            continue
        # What scripts and styles hold is no link. Their own addresses are in the tag.
        text = CODE.sub(lambda found: found[0][: found[0].index(">") + 1], page.read_text())
        for target in sorted(set(LINK.findall(text))):
            if not _is_there(target, page, site):
                lost.append(f"{page.relative_to(site)}: the link {target} leads nowhere")
    return lost


def _is_there(target: str, page: Path, site: Path) -> bool:
    path, _, anchor = target.partition("#")
    is_elsewhere = re.match(r"[a-z]+:|//", path)
    if is_elsewhere:
        return True
    file = (page.parent / unquote(path)).resolve() if path else page
    if not file.is_relative_to(site.resolve()) or not file.exists():
        return False
    # The explorer keeps choices behind #, as name=value.
    has_anchor = anchor and "=" not in anchor and file.suffix == ".html"
    return not has_anchor or unquote(anchor) in _anchors_of(file)


@cache
def _anchors_of(page: Path) -> set[str]:
    return set(ANCHOR.findall(page.read_text()))
