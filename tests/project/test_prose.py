"""The language of the README and of the documentation, as CONTRIBUTING has it."""

import re
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
MOST_WORDS = 45
NO_PROSE = re.compile(r"^```.*?^```|<!--.*?-->|^\s*\|.*?$|^\s*#.*?$|^ {4,}\S.*?$", re.M | re.S)
ITEM = re.compile(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+")


def sentences(text: str) -> list[str]:
    """Split prose; code is one word, a link its text, and an aside in parentheses is left out."""
    flat = re.sub(r"`[^`]*`", "code", " ".join(text.lstrip("-*> ").split()))
    flat = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", flat)
    while (outer := re.sub(r"\s*\([^()]*\)", "", flat)) != flat:
        flat = outer
    flat = flat.replace("e.g. ", "e.g.").replace("et al. ", "et al.").replace("**", "")
    return re.split(r"(?<=[.!?])\s+", flat)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_written_in_plain_sentences(page):
    prose = NO_PROSE.sub("", page.read_text())
    found = [sentence for item in ITEM.split(prose) for sentence in sentences(item.strip())]
    assert [x for x in found if FRAGMENT.match(x) or len(x.split()) > MOST_WORDS] == []
    assert len([x for x in found if REPEATED_NOUN.search(x)]) <= 1
