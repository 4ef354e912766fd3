"""The pages of hf_zero/docs by section, key and mention, for ``hf-zero docs``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hf_zero.config.keys import ALIASES, SECTIONS
from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[1] / "docs"
FENCE = re.compile(r"^(```.*?^```)$", re.M | re.S)
HEADING = re.compile(r"^(#+) (.+)$", re.M)
KEY = re.compile(r"^- \*\*`([^`]+)`\*\*: (.*(?:\n  .*)*)", re.M)  # a row of the reference
WHOLE_ROWS = 4  # keys shown whole at most, for a name that ends several
MENTIONS = 12  # sections listed at most
ENTRY = re.compile(r"^- \[[^\]]+\]\(([a-z-]+)\.md\): (.+)$", re.M)  # of index.md
WORD = re.compile(r"\b[A-Za-z]\w*_\w+")  # a name of several words, in text or code
TOKEN = re.compile(r"[\w+]+")
VOWEL = re.compile(r"[aeiouy]")
DOUBLED = re.compile(r"([bdgmnprt])\1$")  # planning, embedded; not -ll, -ss and -zz, as in rolling


class Section(NamedTuple):
    """A heading and the text below it, up to the next heading of its level."""

    page: str
    title: str
    level: int
    text: str

    @property
    def anchor(self) -> str:
        return anchor_of(self.title)


def anchor_of(title: str) -> str:
    """Return the anchor of a heading, as the site makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def descriptions() -> dict[str, str]:
    """Return one line about each page by name, in the order of index.md."""
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    lines = {name: line.rstrip(".").replace("`", "") for name, line in ENTRY.findall(index)}
    return {"index": "what hf-zero is, and all pages", **lines}


def pages() -> dict[str, str]:
    """Return the text of each page by name, in the order of index.md."""
    return {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in descriptions()}


def sections(page: str, text: str) -> Iterator[Section]:
    """Yield each section of a page; the first is the page itself."""
    # a comment in code is no heading
    blank = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    headings = list(HEADING.finditer(blank))
    for index, heading in enumerate(headings):
        level = len(heading[1])
        after = (other.start() for other in headings[index + 1 :] if len(other[1]) <= level)
        yield Section(page, heading[2], level, text[heading.start() : next(after, len(text))])


def find(topic: str) -> str:
    """Return the Markdown for ``topic``: a page, a section, the row of a key, or a list of the
    sections that name it. Raises ConfigError if there are none.
    """
    texts = pages()
    page, _, anchor = topic.lower().removesuffix(".md").replace(".md#", "#").partition("#")
    if page in texts and not anchor:
        return texts[page]
    if ALIASES.get(topic) in SECTIONS:
        return find(ALIASES[topic])
    anchor_sought = anchor_of(anchor or topic)
    known_sections = [section for name, text in texts.items() for section in sections(name, text)]
    matching = [
        section
        for section in known_sections
        if section.anchor == anchor_sought and (not anchor or section.page == page)
    ]
    keys = _keys(texts["keys"])
    if matching and not (
        topic in keys and all(section.title.strip("`") != topic for section in matching)
    ):
        return min(matching, key=lambda section: (section.page != "keys", section.level)).text
    shown = _rows(topic, keys) or _mentions(topic, known_sections)
    if shown:
        return shown
    words = (word for text in texts.values() for word in WORD.findall(text))
    names = (*words, *(section.title.strip("`") for section in known_sections), *texts, *keys)
    name_of = {anchor_of(name): name for name in names}  # Offload and offload are one topic
    hint = _mean(topic, [*name_of.values()])
    raise ConfigError(f"no page, heading or key {topic!r} in the documentation{hint}")


def names_in(texts: Mapping[str, str]) -> list[str]:
    """Return the keys, and the headings of one word, of the pages ``texts``."""
    titles = (
        section.title.strip("`")
        for name, text in texts.items()
        for section in sections(name, text)
        if section.level > 1
    )
    return sorted({*_keys(texts["keys"]), *(title for title in titles if " " not in title)})


def _keys(text: str) -> dict[str, str]:
    """Return what the reference says of each key, by its dotted path."""
    meanings: dict[str, str] = {}
    for section in sections("keys", text):
        if section.level == 2 and not section.title.startswith("Parameters"):
            before = "" if section.title == "Top level" else section.title.strip("`") + "."
            meanings |= {f"{before}{name}": meaning for name, meaning in KEY.findall(section.text)}
    return meanings


def _rows(topic: str, keys: dict[str, str]) -> str:
    """Return the keys that ``topic`` names by path, former name or last part; "" if it is none."""
    key_of = {key: key for key in keys} | {old: key for old, key in ALIASES.items() if key in keys}
    names = [topic] if topic in key_of else [name for name in key_of if name.endswith(f".{topic}")]
    paths = dict.fromkeys(key_of[name] for name in names)
    rows = []
    for path in paths:
        also = f"Also written `{topic}`. " if topic not in path else ""
        ask = path.rpartition(".")[0] or "keys#top-level"
        more = f"{also}`hf-zero docs {ask}` shows the section."
        row = f"## `{path}`\n\n{keys[path].strip()}\n\n{more}\n"
        rows.append(row if len(paths) <= WHOLE_ROWS else f"- `hf-zero docs {path}`\n")
    return "\n".join(rows) if len(paths) <= WHOLE_ROWS else f"# {topic}\n\n{''.join(rows)}"


def _mentions(topic: str, held: list[Section]) -> str:
    """Return a list of the sections that mention ``topic``, in any inflection: first those with it
    in their heading or in the name of their page, then those with it as code, then the others, the
    most mentions first; "" if there are none.
    """
    stemmed = stems(topic)
    code = re.compile(rf"`(?:[\w.]*\.)?{re.escape(topic)}(?:[(=: ][^`\n]*)?`")
    ranked = list[tuple[int, int, Section]]()
    for section in held:
        text = section.text.split("\n#")[0]  # the innermost section: above its first sub-heading
        name = f"{section.title} {section.page}" if section.level == 1 else section.title
        count = _count(stemmed, stems(text))
        if _count(stemmed, stems(name)):
            ranked.append((0, 0, section))
        elif stemmed and code.search(text):
            ranked.append((1, 0, section))
        elif count:
            ranked.append((2, -count, section))
    mentioning = [section for _, _, section in sorted(ranked, key=lambda row: row[:2])]
    lines = [
        f"- {section.title.strip('`')}: `hf-zero docs "
        f"{section.page if section.level == 1 else f'{section.page}#{section.anchor}'}`"
        for section in mentioning[:MENTIONS]
    ]
    if len(mentioning) > MENTIONS:
        lines.append(f"- {len(mentioning) - MENTIONS} more")
    return "\n".join([f"# {topic}\n\nIn these sections:\n", *lines, ""]) if lines else ""


def _count(sought: list[str], words: list[str]) -> int:
    """Return how often ``sought`` occurs in ``words``, in its order."""
    length = len(sought)
    places = range(len(words) - length + 1) if sought else ()
    return sum(words[start : start + length] == sought for start in places)


def stems(text: str) -> list[str]:
    """Return the stem of each word of ``text``."""
    return [stem(word) for word in TOKEN.findall(text.lower())]


@cache
def stem(word: str) -> str:
    """Return ``word`` without the endings of its inflections, repeatedly: -s, -es, -ed, -ing and -e
    if at least three letters with a vowel remain, and the second of two equal consonants that -ed
    or -ing leaves; -ies and -ied become -y. A name with an underscore is its own stem.
    """
    if "_" in word:
        return word
    shorter = word
    if len(word) > 4 and word.endswith(("ies", "ied")):
        shorter = f"{word[:-3]}y"
    else:
        for ending in ("ing", "ed", "es", "s", "e"):
            base = word.removesuffix(ending)
            if base != word and len(base) >= 3 and VOWEL.search(base) and not word.endswith("ss"):
                shorter = DOUBLED.sub(r"\1", base) if ending in ("ing", "ed") else base
                break
    return word if shorter == word else stem(shorter)


def _mean(topic: str, names: list[str]) -> str:
    hint = did_you_mean(topic, names)
    return hint if "did you mean" in hint else "; hf-zero docs without a topic lists the pages"
