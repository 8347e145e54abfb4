"""Text that leaves the process: without secrets, and without control characters on a terminal.

Secrets are the values of environment variables and of settings that are named like one, and
passwords in addresses. `redact` is the one function that takes them out: of messages, of what
commands print, and of settings in files that others read. Only files for the user's eyes alone
(`mode_of`) hold what a run needs to go on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TextIO

REDACTED = "[redacted]"

# Words of a name: whole ones, `auth` in `smtp-auth` and `smtpAuth`, but not in `author`. Those that
# have other meanings end the name, as `pass_rate` is none.
_BEGIN = r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]))"
_END = r"(?:(?<=[a-z])(?![a-z])|(?<=[A-Z])(?![A-Za-z]))"
_WORD = (
    r"(?i:token|secrets?|passw(?:or)?ds?|pass[_-]?(?:word|phrase|code)s?|pwd|credentials?|cookies?"
    r"|authorization|auth[_-]?(?:header|code)|session[_-]?id|dsn|(?:access|api|auth)[_-]?tokens"
    r"|(?:access|account|api|auth|client|encryption|master|private|secret|shared|signing|ssh"
    rf"|storage)[_-]?keys?){_END}"
)
_PASS = r"(?:(?<![a-z] )(?i:pass)|(?i:pass)(?!: ))"  # not `in the backward pass: less memory`
_LAST_WORD = rf"{_BEGIN}(?:{_PASS}|(?i:pw|auth|creds?|sig|signature|jwt)){_END}\d*(?![\w-])"
_NAME = re.compile(rf"{_WORD}|{_LAST_WORD}")
_NAME_OF_VARIABLE = re.compile(r"key|token|secret|pass|pwd|auth|cred|cookie|session_?id", re.I)
_PUBLIC_VARIABLE = re.compile(r"(?:OLD)?PWD|XDG_.*|DESKTOP_SESSION")  # folders, the desktop's names
_NOTHING = r"(?:null|true|false|None|True|False|\.{3})(?=[\s,;&'\"`\\\]})]|$)"
_FORMS = (
    re.compile(r"(?P<kept>://[^/\s:@'\"]*:)(?P<value>[^/?#\s'\"]+)(?=@)"),  # https://user:...@
    re.compile(
        # The whole name at once, without going back in it: a long text takes no longer than its
        # length. An option of an environment, after a comma, may have spaces in its value.
        rf"(?P<kept>(?P<option>(?<=,))?(?<![\w-])(?=[\w-]*?(?:{_NAME.pattern}))[\w-]*+"
        r"(?P<closing>\\*['\"])?\s*[=:]\s*(?i:(?:bearer|basic|digest|token)\s+)?|(?i:\bbearer\s+))"
        # The value is in quotes, in brackets, an option's, or one word.
        rf"(?!{_NOTHING})(?P<value>(?P<quote>\\*['\"])(?:\\[\s\S]|[^\\])*?(?P=quote)"
        r"|\[[^\]]{0,999}\]|\([^)]{0,999}\)|\{[^}]{0,999}\}"
        r"|(?(option)(?:(?! --)[^,'\"\n\\]|\\++(?!['\"]))+|(?!))"
        r"|(?(closing)[^\s,;&'\"\\\]})]+|['\"]*(?:[^\s,;&'\"\\]|\\++(?!['\"]))+))"
    ),
)
# Names such as a recipe's, versions and lists of numbers.
_HARMLESS = re.compile(r"[a-z]+(?:_[a-z]+)*(?:_[a-z\d]{2,4})?|[\d.,:+-]+")
_WORD_OF_TEXT = re.compile(r"[A-Z]?[a-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


SECRETS_OF_SETTINGS: set[str] = set()  # secrets in the settings of this process's runs


def redact(value: Any, *, stable: bool = False) -> Any:
    """Return a text, or JSON with its names and texts, without secrets.

    Out go passwords in addresses, what is named like a secret (as the key of a value, the first of
    a pair, or in a text), values of environment variables, and the secrets of settings, see
    `remember_secrets`. With `stable` only the first two, so that the result is the same in every
    process: for settings, which are compared and shown.

    Values of variables that stay are those that any text may hold: paths, plain words, numbers and
    what has less than 6 characters. If the name of the variable sounds like a secret, they are
    plain words of less than 8 letters, and what has less than 4 characters. Longer words are left
    out as a whole.
    """
    return _without(value, [] if stable else [*_known_values()], set())


def remember_secrets(settings: Any) -> None:
    """Keep the secrets in settings out of all later messages, wherever these quote them."""
    SECRETS_OF_SETTINGS.update(filter(_is_secret, _secrets_in(settings)))


def mode_of(settings: Any) -> int:
    """Return the mode of a file with these settings: for the user alone if a secret is inside."""
    return 0o600 if _secrets_in(settings) else 0o644


@contextlib.contextmanager
def redacted_output(*, json_alone: bool = False) -> Iterator[None]:
    """Redact what is printed; stdout, from which programs read paths, keeps values of variables.

    With `json_alone`, stdout has what `print_json` prints, and stderr has the rest.
    """
    stdout: Any = _RedactedStream(sys.stdout, stable=True)
    stderr: Any = _RedactedStream(sys.stderr, stable=False)
    if json_alone:
        stderr.of_json, stdout = stdout, stderr
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield


class _RedactedStream:
    """Stream whose text is redacted before it is written to another one."""

    def __init__(self, stream: TextIO, *, stable: bool) -> None:
        self._stream, self._stable = stream, stable

    def write(self, text: str) -> int:
        return self._stream.write(redact(text, stable=self._stable))

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """End the block, without an error, where nobody reads the output any more, as in `| head`."""
    try:
        yield
    except OSError as error:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # a hangup is reported without being asked for
        if error.errno not in (errno.EPIPE, errno.EIO) or not poll.poll(0):
            raise


def print_json(value: Any) -> None:
    """Print a result as a line of JSON, the only text on stdout of a command with `--json`."""
    print(json.dumps(plain(value)), file=getattr(sys.stdout, "of_json", sys.stdout), flush=True)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers and lists, null for what is not finite."""
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy scalars and arrays
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def redact_log() -> None:
    """Redact all records of the logger `podracer` and of its children, and of no other."""
    make = logging.getLogRecordFactory()

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if str(record.name).partition(".")[0] == "podracer":
            _clean_record(record)
        return record

    logging.setLogRecordFactory(make_redacted)


def _clean_record(record: logging.LogRecord) -> None:
    """Take secrets and control characters out of a message of the log, and of its traceback."""
    record.msg, record.args = printable(redact(record.getMessage())), ()
    if record.exc_info:
        text = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        record.exc_text, record.exc_info = printable(redact(text)), None
    if record.stack_info:
        record.stack_info = printable(redact(record.stack_info))


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


def _without(value: Any, patterns: Sequence[re.Pattern[str]], secrets: set[str]) -> Any:
    """Return text or JSON without known values, and without those that are named like a secret.

    The latter are added to `secrets`.
    """
    if isinstance(value, Mapping):
        return dict(_without([str(key), item], patterns, secrets) for key, item in value.items())
    if isinstance(value, list | tuple):
        if _is_named_secret(value):
            secrets.add(str(value[1]))
            return [_without(value[0], patterns, secrets), REDACTED]
        return [_without(item, patterns, secrets) for item in value]
    if isinstance(value, str):
        for pattern in patterns:
            value = pattern.sub(REDACTED, value)
        for form in _FORMS:
            value = form.sub(partial(_cut, secrets), value)
    return value


def _is_named_secret(pair: Sequence[Any]) -> bool:
    """Return whether a sequence is the name of a secret and its value."""
    is_named = len(pair) == 2 and isinstance(pair[0], str) and _NAME.search(pair[0]) is not None
    return is_named and not (pair[1] is None or isinstance(pair[1], bool) or pair[1] == REDACTED)


def _cut(secrets: set[str], match: re.Match[str]) -> str:
    parts = match.groupdict()
    value = parts["value"].strip("\\'\"")
    if value in ("", REDACTED):
        return match[0]
    secrets.add(value)
    quote = parts.get("quote") or parts.get("closing") or ""
    return f"{parts['kept']}{quote}{REDACTED}{quote}"


def _secrets_in(value: Any) -> set[str]:
    """Return what `redact` takes out of settings."""
    secrets: set[str] = set()
    _without(value, (), secrets)
    return secrets


def _known_values() -> Iterator[re.Pattern[str]]:
    """Yield patterns of known values, the longest first: none survives in part in another."""
    values = SECRETS_OF_SETTINGS.union(_values_of_variables())
    for value in sorted(values, key=len, reverse=True):
        pattern = re.escape(value)
        if _WORD_OF_TEXT.fullmatch(value):  # not within another word, but after an escape, `\n`
            pattern = rf"(?:(?<![A-Za-z])|(?<=\\[nrt])){pattern}(?![A-Za-z])"
        yield re.compile(pattern)


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
