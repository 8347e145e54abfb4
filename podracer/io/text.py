"""Text that leaves the process: without secrets, and without control characters on a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator

REDACTED = "[redacted]"

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
    r"(?:\"[^\"]*\"|'[^']*'|[^\s,;&'\"@]+)",
    re.IGNORECASE,
)
_TOKEN = re.compile(  # of a known form: private keys, JSON web tokens, GitHub, Hugging Face, ...
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|\b(?:gh[oprsu]_|github_pat_|glpat-|hf_|npm_|pypi-|sk-|xox[abprs]-|AIza)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
)
# Names such as that of a recipe, versions and lists of numbers.
_HARMLESS = re.compile(r"[a-z]+(?:_[a-z]+)*(?:_[a-z\d]{2,4})?|[\d.,:+-]+")
_WORD_OF_TEXT = re.compile(r"[A-Z]?[a-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def is_sensitive(name: str) -> bool:
    """Return whether a value of this name, such as `api_key`, should not be written."""
    return _NAME.search(name) is not None


def redact(text: str) -> str:
    """Return a text without values of environment variables and without what looks like a secret.

    Values that stay are those that any text may hold: paths, plain words, numbers and what has less
    than 6 characters. If the name of the variable sounds like a secret, they are plain words of
    less than 8 letters, and what has less than 4 characters. Longer words are left out as a whole.
    """
    # The longest first, so that none survives in part inside a longer one.
    for value in sorted(set(_values_of_variables()), key=len, reverse=True):
        pattern = re.escape(value)
        if _WORD_OF_TEXT.fullmatch(value):  # not within another word, but after an escape, `\n`
            pattern = rf"(?:(?<![A-Za-z])|(?<=\\[nrt])){pattern}(?![A-Za-z])"
        text = re.sub(pattern, REDACTED, text)
    return _AFTER_NAME.sub(rf"\g<kept>{REDACTED}", _TOKEN.sub(REDACTED, text))


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


def _values_of_variables() -> Iterator[str]:
    for name, value in os.environ.items():
        if _PUBLIC_VARIABLE.fullmatch(name):
            continue
        sounds_secret = _NAME_OF_VARIABLE.search(name) is not None
        for line in value.splitlines():
            is_short_word = len(line) < 8 and _WORD_OF_TEXT.fullmatch(line) is not None
            is_secret = len(line) >= 4 and not is_short_word
            if is_secret if sounds_secret else len(line) >= 6 and not _is_public(line):
                yield line
                yield repr(line)[1:-1]


def _is_public(value: str) -> bool:
    first_folder = "/".join(value.split("/")[:2])
    is_path = len(first_folder) > 1 and first_folder[0] == "/" and os.path.isdir(first_folder)
    return is_path or _HARMLESS.fullmatch(value) is not None


def explain_error(error: Exception) -> int:
    """Print the sentence of an error, or a traceback if it is nobody's; return the exit code."""
    code = getattr(error, "exit_code", None)
    if code is None:
        print_stderr("".join(traceback.format_exception(error)).rstrip(), prefix="")
        return 70
    print_stderr(str(error))
    return code
