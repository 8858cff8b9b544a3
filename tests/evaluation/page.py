"""A report's page as a test reads it."""

from __future__ import annotations

from collections import defaultdict
from html.parser import HTMLParser


class Page(HTMLParser):
    """The resources that a page loads, its attributes by name, its nesting, and its text."""

    VOID = ("meta", "img", "source", "br", "link")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.pictures_of: list[str] = []
        self.attributes: dict[str, list[str | None]] = defaultdict(list)
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        keys = ("src", "srcset", "href", "xlink:href")
        self.sources += [v for k in keys if (v := given.get(k)) is not None]
        for name, value in attrs:
            self.attributes[name].append(value)
        assert tag not in ("script", "link", "iframe", "foreignobject")
        if tag == "img":
            self.pictures_of.append(given["alt"] or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
