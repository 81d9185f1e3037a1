"""Check every link of the built site: pages, anchors, pictures and files of the repository.

``python -m docs._site.check_links build/site`` prints what is broken; its exit status is then 1.
Other addresses on the internet are not asked for.
"""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docs._site.repository import ROOT, repository

HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's id, name and address."""
        for name, value in attrs:
            if not value:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.links.add(value)


@cache
def page_of(file: Path) -> Page:
    """Return what a built page has."""
    return Page(file.read_text(encoding="utf-8"))


@cache
def headings(file: Path) -> set[str]:
    """Return the anchors that GitHub gives a Markdown file's headings."""
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    titles = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def fault(link: str, file: Path) -> str | None:
    """Say what is wrong with a link of a built page; None if nothing is."""
    if link.startswith(f"{repository()}/"):
        return _repository_fault(link)
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if target.suffix == ".html" and anchor not in page_of(target).anchors:
        return "the page has no such anchor"
    return None


def _repository_fault(link: str) -> str | None:
    parts = urlsplit(link.removeprefix(f"{repository()}/"))
    kind, _, path = parts.path.partition("/main/")
    if kind not in ("blob", "tree", "edit", "raw"):
        return None
    target = ROOT / unquote(path)
    if not target.exists():
        return "the repository has no such file"
    if target.suffix == ".md" and parts.fragment and parts.fragment not in headings(target):
        return "the file has no such heading"
    return None


def faults(site: Path) -> list[str]:
    """Return a line for every broken link of a built site."""
    site = site.resolve()
    return [
        f"{file.relative_to(site)}: {link}: {wrong}"
        for file in sorted(site.rglob("*.html"))
        for link in sorted(page_of(file).links)
        if (wrong := fault(link, file)) is not None
    ]


def main(folder: str) -> int:
    """Print the broken links of a built site; return 1 if there are any."""
    found = faults(Path(folder))
    print("\n".join(found) or f"every link of {folder} leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
