"""What the command line does with mistakes, signals and hostile files: a sentence and a code."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import podracer
from podracer.cli import main as command_line
from podracer.cli.main import main
from podracer.cli.train import FreeSettings
from podracer.experiments.experiment import Experiment
from podracer.experiments.serialization import FREE_ON_RESUME
from podracer.io.seal import read_sealed_json, seal_json
from podracer.io.signals import StopSignals, exit_on_stop
from podracer.io.sinks import read_metrics


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


CHUNK = 8 * 4 * 5


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run of two chunks; tests work on copies of it."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    driver = {"num_envs": 8, "rollout_length": 4, "updates_per_chunk": 5}
    podracer.train(
        "catch_a2c", run_dir=directory, frames=2 * CHUNK, driver=driver, devices=1, evaluations=0,
        save_seconds=0.0, agent={"network": {"torso": {"hidden": (8,)}}},
    )  # fmt: skip
    return directory


@pytest.fixture
def run(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr("podracer.cli.train.initialize_devices", lambda *_: None)  # they are
    return Path(shutil.copytree(finished_run, tmp_path / "copy"))


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


# --- resume ---------------------------------------------------------------------------------------


def test_resume_has_a_flag_for_every_setting_that_may_change():
    hints = typing.get_type_hints(FreeSettings)
    assert hints.keys() == FREE_ON_RESUME
    for name, hint in typing.get_type_hints(Experiment).items():
        if name in hints:
            assert hints[name] == hint | None, name


def test_a_resumed_run_takes_other_settings_and_keeps_them(run, outcome):
    (run / "crash.json").write_text("{}")
    code, text = outcome("resume", run, "--frames", 3 * CHUNK, "--save-seconds", 7)
    assert code == 0, text
    experiment = json.loads((run / "config.json").read_text())["experiment"]
    assert (experiment["frames"], experiment["save_seconds"]) == (3 * CHUNK, 7)
    assert [record["updates"] for record in read_metrics(run / "metrics.jsonl")] == [5, 10, 15]
    assert {"crash.previous.json"} == {path.name for path in run.glob("crash*")}


def test_what_decides_an_update_cannot_change_at_resume(run, outcome):
    code, text = outcome("resume", run, "--learning-rate", 1)
    assert (code, "learning-rate" in text) == (78, True)
    config = read_sealed_json(run / "config.json")
    config["experiment"]["seed"] = 5
    seal_json(run / "config.json", config)
    code, text = outcome("resume", run)
    assert code == 78, text
    assert "another configuration: seed was 0 and is 5" in text


THREAD = """
import sys, threading
from podracer.cli import main as module
module._THREAD_SECONDS = 0.1
threading.Thread(target=threading.Event().wait, args=(60,), name="simulator").start()
sys.argv[1:] = ["trian"]
module.main()
"""


def test_a_thread_that_goes_on_does_not_keep_the_process_alive():
    done = subprocess.run(
        [sys.executable, "-c", THREAD], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 78
    assert "left behind by force: simulator." in done.stderr
