"""Text that leaves the process: without secrets, and without control characters on a terminal.

Secrets are the values of environment variables and of settings that are named like one, and what
looks like one. `redact` is for messages, `redact_settings` for settings in files that others read;
only files for the user's eyes alone (`mode_of`) hold what a run needs to go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_WORD = (
    r"(?:token|secret|passw(?:or)?d|passphrase|pwd|(?:api|access|private|ssh|signing)[_-]?key"
    r"|credential|authorization|cookie|session[_-]?id|dsn)"
)
_NAME = re.compile(_WORD, re.IGNORECASE)
_NAME_OF_VARIABLE = re.compile(r"key|token|secret|pass|pwd|auth|cred|cookie|session_?id", re.I)
_PUBLIC_VARIABLE = re.compile(r"(?:OLD)?PWD|XDG_.*|DESKTOP_SESSION")  # folders, the desktop's names
_AFTER_NAME = re.compile(
    # Values after `token=`, `"token": `, `bearer ` and `https://user:` (before an `@`).
    # The whole name at once, without going back in it: a long text takes no longer than its length.
    rf"(?P<kept>(?<![\w-])(?=[\w-]*?{_WORD})[\w-]*+['\"]?\s*[=:]\s*(?:bearer\s+|basic\s+)?"
    r"|\bbearer\s+|://[^/\s:@]*:(?=[^/\s@]+@))"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&'\"@]+)",
    re.IGNORECASE,
)
# Text in a line of code that a traceback quotes, which may be a secret; names and plain words stay.
_QUOTED_LINE = re.compile(r'^(?P<place>[ |+]*File "(?P<file>.+)", line \d+.*\n)(?P<code>.+)', re.M)
_LIBRARIES = re.compile(rf"/site-packages/|/lib/python3|^{re.escape(_PACKAGE)}")
_LITERAL = re.compile(r"(?P<quote>['\"])(?P<text>(?:\\.|(?!(?P=quote)).)*)(?P=quote)")
_TOKEN = re.compile(  # known forms: private keys, JSON web tokens, GitHub, Hugging Face, ...
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|\b(?:gh[oprsu]_|github_pat_|glpat-|hf_|npm_|pypi-|sk-|xox[abprs]-|AIza)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
)
# Names such as a recipe's, versions and lists of numbers.
_HARMLESS = re.compile(r"[a-z]+(?:_[a-z]+)*(?:_[a-z\d]{2,4})?|[\d.,:+-]+")
_WORD_OF_TEXT = re.compile(r"[A-Z]?[a-z]+")
_WORD_IN_CODE = re.compile(r"[A-Za-z_]*[.,:;!?()]*|%[a-z]|\{\w*\}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def is_named_secret(pair: Sequence[Any]) -> bool:
    """Return whether a sequence is the name of a secret and its value."""
    is_named = len(pair) == 2 and isinstance(pair[0], str) and _NAME.search(pair[0]) is not None
    return is_named and pair[1] is not None and not isinstance(pair[1], bool)


def remember_secrets(settings: Any) -> None:
    """Keep the secrets in settings out of all later messages, wherever these quote them."""
    SECRETS_OF_SETTINGS.update(filter(_is_secret, _secrets_in(settings)))


def redact_settings(value: Any) -> Any:
    """Return settings as JSON, without the secrets in them; it depends on nothing else.

    A name and a value may be a key and its value, a pair in a list, or parts of a text.
    """
    return redact_json(value, _redact_forms)


def redact_json(value: Any, clean: Callable[[str], str]) -> Any:
    """Return JSON without the values of names that sound secret, and with all texts cleaned."""
    if isinstance(value, Mapping):
        items = ((str(key), item) for key, item in value.items())
        return {clean(key): redact_json([key, item], clean)[1] for key, item in items}
    if isinstance(value, list | tuple):
        if is_named_secret(value):
            return [value[0], REDACTED]
        return [redact_json(item, clean) for item in value]
    return clean(value) if isinstance(value, str) else value


def mode_of(settings: Any) -> int:
    """Return the mode of a file with these settings: for the user alone if a secret is inside."""
    return 0o644 if next(_secrets_in(settings), None) is None else 0o600


def redact(text: str) -> str:
    """Return a text without values of environment variables and without what looks like a secret.

    It also leaves out the secrets of settings, see `remember_secrets`, and text in lines of code.

    Values that stay are those that any text may hold: paths, plain words, numbers and what has less
    than 6 characters. If the name of the variable sounds like a secret, they are plain words of
    less than 8 letters, and what has less than 4 characters. Longer words are left out as a whole.
    """
    # The longest first, so that none survives in part inside a longer one.
    values = SECRETS_OF_SETTINGS.union(_values_of_variables())
    for value in sorted(values, key=len, reverse=True):
        pattern = re.escape(value)
        if _WORD_OF_TEXT.fullmatch(value):  # not within another word, but after an escape, `\n`
            pattern = rf"(?:(?<![A-Za-z])|(?<=\\[nrt])){pattern}(?![A-Za-z])"
        text = re.sub(pattern, REDACTED, text)
    return _QUOTED_LINE.sub(_without_literals, _redact_forms(text))


def clean_record(record: logging.LogRecord) -> bool:
    """Take secrets and control characters out of a message of the log, and of its traceback."""
    record.msg, record.args = printable(redact(record.getMessage())), ()
    if record.exc_info:
        text = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        record.exc_text, record.exc_info = printable(redact(text)), None
    return True


def printable(text: str) -> str:
    r"""Return a text whose control characters are spelled out, `\x1b`; lines and tabs stay.

    A name in a file could otherwise move the cursor of a terminal, or change its title.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_stderr(message: str, prefix: str = "podracer: ") -> None:
    """Print a line for the user, redacted and printable; nothing where stderr is closed."""
    if sys.stderr is None:  # then print would take stdout
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"{prefix}{printable(redact(message))}", file=sys.stderr, flush=True)


SECRETS_OF_SETTINGS: set[str] = set()  # secrets in the settings of this process's runs


def _redact_forms(text: str) -> str:
    return _AFTER_NAME.sub(rf"\g<kept>{REDACTED}", _TOKEN.sub(REDACTED, text))


def _secrets_in(value: Any) -> Iterator[str]:
    """Yield what `redact_settings` leaves out."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        yield from [str(value[1])] if is_named_secret(value) else ()
        for item in value:
            yield from _secrets_in(item)
    elif isinstance(value, str):
        yield from (match["value"].strip("'\"") for match in _AFTER_NAME.finditer(value))
        yield from (match[0] for match in _TOKEN.finditer(value))


def _without_literals(match: re.Match[str]) -> str:
    def cleaned(literal: re.Match[str]) -> str:
        text = literal["text"]
        is_plain = all(_WORD_IN_CODE.fullmatch(word) for word in text.split())
        return literal[0] if is_plain else f"{literal['quote']}{REDACTED}{literal['quote']}"

    if _LIBRARIES.search(match["file"]):
        return match[0]
    return match["place"] + _LITERAL.sub(cleaned, match["code"])


def _values_of_variables() -> Iterator[str]:
    for name, value in os.environ.items():
        if _PUBLIC_VARIABLE.fullmatch(name):
            continue
        sounds_secret = _NAME_OF_VARIABLE.search(name) is not None
        for line in value.splitlines():
            if _is_secret(line) if sounds_secret else len(line) >= 6 and not _is_public(line):
                yield line
                yield repr(line)[1:-1]


def _is_secret(value: str) -> bool:
    """Return whether a value with the name of a secret is left out: a short word is none."""
    is_short_word = len(value) < 8 and _WORD_OF_TEXT.fullmatch(value) is not None
    return len(value) >= 4 and not is_short_word


def _is_public(value: str) -> bool:
    first_folder = "/".join(value.split("/")[:2])
    is_path = len(first_folder) > 1 and first_folder[0] == "/" and os.path.isdir(first_folder)
    return is_path or _HARMLESS.fullmatch(value) is not None


def explain_error(error: Exception, translate: Callable[[str], str] = str) -> int:
    """Print the sentence of an error, or a traceback if it is nobody's; return the exit code."""
    code = getattr(error, "exit_code", None)
    if code is None:
        print_stderr("".join(traceback.format_exception(error)).rstrip(), prefix="")
        return 70
    sentence = translate(str(error))
    print_stderr(sentence if sentence.endswith((".", "?", ")")) else f"{sentence}.")
    return code
