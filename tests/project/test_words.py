"""The language of comments, docstrings and names, as CONTRIBUTING has it."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRAGMENT = re.compile(r"(of|that|which|as)\b(?! soon as| long as)", re.IGNORECASE)
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


def texts(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) of comments and docstrings; comment lines in a row are one text."""
    end, start, text = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# pyright", "# type")):
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        comment = token.string.lstrip("# -")
        if alone and line == end + 1:
            text, end = f"{text} {comment}", line
            continue
        if text:
            yield start, "comment", text
        text, start, end = comment, line, line if alone else 0
    if text:
        yield start, "comment", text
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, "docstring", text


def refused_words(source: str) -> Iterator[str]:
    """Yield what is refused in a file, each with its line."""
    repeated = []
    for line, kind, text in texts(source):
        if FRAGMENT.match(text.strip()):
            yield f"{line}: a {kind} begins with {text.strip().split()[0]!r}: {text.strip()[:60]}"
        repeated += [line] * len(REPEATED_NOUN.findall(text))
    if len(repeated) > 1:
        yield f"{repeated[1]}: 'that of' or 'those of' stands {len(repeated)} times in this file"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if name.strip("_") in REFUSED_NAMES:
            yield f"{node.lineno}: {name!r} does not name what it holds"


def test_the_package_is_written_in_plain_words():
    paths = [*ROOT.glob("podracer/**/*.py"), *ROOT.glob("packages/*/podracer_*/**/*.py")]
    found = [f"{path}:{x}" for path in sorted(paths) for x in refused_words(path.read_text())]
    assert found == []
