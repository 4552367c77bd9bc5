"""Reads a report as a browser would: every element closed, its text, its tables, its pictures."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "source", "br"}


@dataclass
class Token:
    """A span of a passage."""

    classes: list[str]
    title: str
    text: str = ""


@dataclass
class Page:
    text: str = ""
    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)  # tag, name, value
    tables: list[list[list[str]]] = field(default_factory=list)
    passages: list[list[Token]] = field(default_factory=list)

    def column(self, table: int, name: str) -> list[str]:
        """The cells under a header, their narrow spaces made plain."""
        header, *rows = self.tables[table]
        return [row[header.index(name)].replace("\u202f", " ") for row in rows]

    def row(self, table: int, name: str) -> list[str]:
        """The cells beside a row's first cell, their narrow spaces made plain."""
        rows = [[cell.replace("\u202f", " ") for cell in row] for row in self.tables[table]]
        (found,) = [cells for first, *cells in rows if first == name]
        return found

    def values(self, tag: str, name: str) -> list[str]:
        return [value for found, key, value in self.attributes if (found, key) == (tag, name)]


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page, self.open = Page(), []

    def handle_starttag(self, tag, attrs):
        self.page.tags.append(tag)
        self.page.attributes += [(tag, name, value or "") for name, value in attrs]
        classes = dict(attrs).get("class", "").split()
        if tag == "table":
            self.page.tables.append([])
        elif tag == "tr":
            self.page.tables[-1].append([])
        elif tag in ("th", "td"):
            self.page.tables[-1][-1].append("")
        elif "passage" in classes:
            self.page.passages.append([])
        elif tag == "span" and "passage" in self.open[-1][1]:
            self.page.passages[-1].append(Token(classes, dict(attrs)["title"]))
        if tag not in VOID:
            self.open.append((tag, classes))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1][0]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "style":
            return
        self.page.text += data
        if self.open and self.open[-1][0] in ("th", "td"):
            self.page.tables[-1][-1][-1] += data
        elif len(self.open) > 1 and "passage" in self.open[-2][1]:
            self.page.passages[-1][-1].text += data


def read(path: Path) -> Page:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == [], "elements left open"
    return reader.page
