"""The language of the README and of the documentation, as CONTRIBUTING has it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", "benchmarks/*.md", "packages/*/*.md")
    for path in ROOT.glob(pattern)
)
FRAGMENT = re.compile(r"(of|that|which|as)\b(?! soon as| long as| well as)", re.IGNORECASE)
REPEATED_NOUN = re.compile(r"\b(that|those) of\b", re.IGNORECASE)
MOST_REPEATED, MOST_WORDS, AVERAGE_WORDS = 1, 45, 20
SEVERAL = 10  # sentences, whose average tells how a page is written
NO_PROSE = re.compile(r"^```.*?^```|<!--.*?-->|^\s*\|.*?$|^\s*#.*?$|^ {4,}\S.*?$", re.M | re.S)
ITEM = re.compile(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+")


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of paragraphs and items of lists, without code, tables and headings."""
    prose = NO_PROSE.sub(lambda match: re.sub(r"[^\n]", "", match[0]), page)
    start = 0
    for end in [*ITEM.finditer(prose), None]:
        text = prose[start : end.start() if end else None]
        if text.strip():
            line = prose[:start].count("\n") + 1 + text[: -len(text.lstrip())].count("\n")
            yield line, text.strip().lstrip("-*> ")
        start = end.end() if end else len(prose)


def sentences(text: str) -> list[str]:
    """Split prose; code is one word, a link its text, and an aside in parentheses is left out."""
    flat = re.sub(r"`[^`]*`", "code", " ".join(text.split()))
    flat = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", flat)
    while (outer := re.sub(r"\s*\([^()]*\)", "", flat)) != flat:
        flat = outer
    flat = flat.replace("e.g. ", "e.g.").replace("et al. ", "et al.").replace("**", "")
    return re.split(r"(?<=[.!?])\s+", flat)


def refused(page: str) -> list[str]:
    """Return what is refused in a page, each with its line."""
    faults, repeated, counts = [], [], []
    for line, text in blocks(page):
        for sentence in sentences(text):
            if FRAGMENT.match(sentence):
                faults.append(f"{line}: begins with {sentence.split()[0]!r}: {sentence[:70]}")
            repeated += [line] * len(REPEATED_NOUN.findall(sentence))
            counts.append(len(sentence.split()))
            if counts[-1] > MOST_WORDS:
                faults.append(f"{line}: a sentence of {counts[-1]} words: {sentence[:70]}")
    if len(repeated) > MOST_REPEATED:
        faults.append(f"'that of' or 'those of' in lines {', '.join(map(str, repeated))}")
    if len(counts) >= SEVERAL and sum(counts) / len(counts) > AVERAGE_WORDS:
        faults.append(f"sentences have {sum(counts) / len(counts):.1f} words on average")
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_written_in_plain_sentences(page):
    assert refused(page.read_text()) == []
