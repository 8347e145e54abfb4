"""What the command line does with mistakes, signals and hostile files: a sentence and a code."""

from __future__ import annotations

import errno
import logging
import os
import signal

import pytest

from podracer.cli import main as command_line
from podracer.cli.main import main
from podracer.io.signals import StopSignals, exit_on_stop


@pytest.fixture
def outcome(capfd, tmp_path, monkeypatch):
    """Run a command in this process, in an empty folder; return its exit code and all it said."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main([str(argument) for argument in arguments])
        return leaving.value.code, "".join(capfd.readouterr())

    return run


@pytest.fixture
def command_that(monkeypatch):
    """Put a function in the place of the import of every command."""
    return lambda function: monkeypatch.setattr(
        command_line.importlib, "import_module", lambda _: function()
    )


def raise_error(error):
    raise error


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_preemption_before_the_run_begins_is_code_75(number, outcome, command_that):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    command_that(lambda: os.kill(os.getpid(), number))
    code, text = outcome("train")
    assert code == 75
    assert text == f"podracer: ended by {number.name}; there was nothing to save.\n"
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == handlers


def test_ctrl_c_before_the_run_begins_is_a_sentence(outcome, command_that):
    command_that(lambda: raise_error(KeyboardInterrupt()))
    assert outcome("train") == (130, "podracer: stopped by Ctrl-C.\n")


def test_nohup_is_respected():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = StopSignals()
        with exit_on_stop(), signals.installed():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signals.exit_code is None
    finally:
        signal.signal(signal.SIGHUP, previous)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), 73, "a/b: Permission denied."),
        (OSError(errno.ENOSPC, "No space left on device"), 73, "No space left on device."),
        (MemoryError("Unable to allocate 9 TiB"), 71, "out of memory: take fewer environments."),
    ],
)
def test_disk_and_memory_are_sentences(error, code, sentence, outcome, command_that):
    command_that(lambda: raise_error(error))
    result, text = outcome("train")
    assert result == code
    assert text.startswith(f"podracer: {sentence}")
    assert text.count("\n") == 1


def test_a_broken_pipe_inside_a_command_is_no_success(outcome, command_that):
    """Only one of the output means that the reader has left."""
    command_that(lambda: raise_error(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert outcome("train")[0] == 70


def test_what_reaches_the_terminal_has_no_secret_and_no_escape_code(
    outcome, command_that, monkeypatch, caplog
):
    monkeypatch.setenv("SESSION", "s3ss-10n")
    text = "login by s3ss-10n \x1b]0;title\x07 failed"

    def fail():
        logging.getLogger("podracer").warning("warned: %s", text)
        raise ValueError(text)

    command_that(fail)
    code, said = outcome("train")
    assert code == 70
    for message in (said, caplog.text):
        assert "login by [redacted] \\x1b]0;title\\x07 failed" in message
        assert not any(part in message for part in ("s3ss-10n", "\x1b", "\x07"))
