"""The language of comments, docstrings and names, as CONTRIBUTING has it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRAGMENT = re.compile(r"(of|that|which|as)\b(?! soon as| long as)", re.IGNORECASE)
COMMENT = re.compile(r"(?:^ *#[ -].*\n)+|  # .*$", re.MULTILINE)  # lines of one in a row
REPEATED_NOUN = re.compile(r"\b(that|those) of\b", re.IGNORECASE)
# Pronouns, participles, prepositions and adverbs: nobody knows what such a variable holds.
REFUSED_NAMES = set(
    re.findall(
        r"\w+",
        """
        about above across after again also any apart around away back before began begun behind
        below beside between beyond both brought by came chosen done drawn during each either
        else ever few found from gone given here how if in inside into it just kept known like
        lost made many more most much near neither none nor not now of off on once one only onto
        other others ours out outside over own perhaps quite rather rest seen so some such taken
        than that their them then there these they this those though thus till to together too
        toward under until up upon very was were what when where which while whose why with
        within without yet
        """,
    )
)


def refused_words(source: str) -> Iterator[str]:
    """Yield what is refused in a file."""
    nodes = list(ast.walk(ast.parse(source)))
    texts = [re.sub(r"^[ #-]+", "", match[0]) for match in COMMENT.finditer(source)]
    for node in nodes:
        match node:
            case ast.Expr(ast.Constant(str(text))):
                texts.append(text.strip())
            case ast.arg(name) | ast.Name(name, ast.Store()) if name.strip("_") in REFUSED_NAMES:
                yield f"line {node.lineno}: {name!r} does not name what it holds"
    yield from (f"begins with a fragment: {text[:60]}" for text in texts if FRAGMENT.match(text))
    repeated = [text for text in texts for _ in REPEATED_NOUN.findall(text)]
    yield from (f"'that of' or 'those of' once more: {text[:60]}" for text in repeated[1:])


def test_the_package_is_written_in_plain_words():
    paths = [*ROOT.glob("podracer/**/*.py"), *ROOT.glob("packages/*/podracer_*/**/*.py")]
    found = [f"{path}:{x}" for path in sorted(paths) for x in refused_words(path.read_text())]
    assert found == []
