"""What the command line does with mistakes, signals and hostile files: a sentence and a code."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest

import podracer
from podracer import recipes
from podracer.cli import main as command_line
from podracer.cli.arguments import parse
from podracer.cli.main import main
from podracer.cli.recipe_flags import find_experiment, find_recipe, parse_experiment
from podracer.cli.resume import free_settings
from podracer.cli.settings import settings_of
from podracer.cli.train import TrainOptions
from podracer.cli.values import Mark
from podracer.config.serialization import to_json
from podracer.errors import CheckpointError, ConfigError
from podracer.io.exits import exit_on_stop
from podracer.io.seal import read_sealed_json, seal_json
from podracer.io.signals import StopSignals
from podracer.io.sinks import read_metrics
from podracer.io.text import print_json
from podracer.run.resume import FREE_ON_RESUME, Totals, check_metadata

pytestmark = pytest.mark.usefixtures("shared")  # what is patched is not traced


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


DROPPED = """
    class Garbage:
        def __del__(self):
            preempt()
    Garbage()
"""
SWALLOWED = """
    with contextlib.suppress(BaseException):
        preempt()
"""


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGTERM, "preempt()"),
        (signal.SIGHUP, "preempt()"),
        (signal.SIGTERM, DROPPED),
        (signal.SIGTERM, SWALLOWED),
    ],
    ids=["SIGTERM", "SIGHUP", "garbage", "import"],
)
def test_a_preemption_before_the_run_begins_is_code_75(number, moment, tmp_path, capfd):
    """Even within code that drops exceptions, as some imports and callbacks of JAX do."""
    (tmp_path / "command.py").write_text(
        f"""import contextlib, os, signal, time
def preempt():
    print("before")
    os.kill(os.getpid(), {number})
    time.sleep(0)  # the handler runs here
{textwrap.dedent(moment)}
time.sleep(60)
"""
    )
    code = f"""
        import sys
        from podracer.cli import main
        sys.path.insert(0, {str(tmp_path)!r})
        main.importlib.import_module = lambda _: __import__("command")
        main.main(["train"])
    """
    assert in_child(code) == (75, "before\n")
    error = capfd.readouterr().err
    assert error == f"podracer: ended by {number.name}; there was nothing to save.\n"


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


def in_child(code, meanwhile=lambda process: None):
    """Run Python code in a child, and return its exit code and the rest of its standard output."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        meanwhile(process)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out
    finally:
        process.kill()


@pytest.mark.parametrize("stderr", ["io.StringIO()", "None", "open('/dev/full', 'w')"])
def test_a_stall_ends_the_run_whatever_stderr_is(stderr):
    code = f"""
        import io, sys, time
        from podracer.io.exits import own_process
        from podracer.io.signals import Watchdog
        sys.stderr = {stderr}
        with own_process(), Watchdog(0.1, lambda message: print("stalled", flush=True)):
            time.sleep(60)
    """
    assert in_child(code) == (76, "stalled\n")


def test_a_command_ends_whose_environment_left_a_thread():
    code = """
        import sys, threading, time
        from podracer.cli import main, train
        from podracer.io import exits
        exits.THREAD_SECONDS = 0.1
        def preempted(arguments):
            threading.Thread(target=time.sleep, args=(120,)).start()
            return 75
        train.train = preempted
        sys.argv = ["podracer", "train"]
        main.main()
    """
    assert in_child(code) == (75, "")


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


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("train catch --run-dir new", "new"),
        ("sweep catch --run-dir new", "new"),
        ("tournament catch --run-dir new", "new"),
        ("init mine", "mine"),
        ("report RUN --out page.html", "."),
    ],
)
def test_a_full_disk_at_the_start_is_the_same_sentence(command, folder, run, outcome, monkeypatch):
    monkeypatch.setattr("podracer.cli.train.initialize_devices", lambda *_: None)  # they are
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: raise_error(error))
    code, text = outcome(*command.replace("RUN", str(run)).split())
    assert code == 73
    assert text.startswith("podracer: no file can be made in ")
    assert text.endswith(f"{folder}: No space left on device; choose another directory.\n")


def test_a_directory_that_cannot_be_made_is_a_sentence(outcome, monkeypatch):
    monkeypatch.setattr("podracer.cli.train.initialize_devices", lambda *_: None)
    code, text = outcome("train", "catch", "--run-dir", "/proc/podracer")
    assert code == 73
    assert text.startswith("podracer: /proc/podracer cannot hold a run: ")


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


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES = [
    # names
    ("trian", "did you mean train"),
    ("-x", "There is no command '-x'"),
    ("eval", "eval needs RUN: write podracer eval RUN."),
    ("train cartpole_pp", "did you mean cartpole_ppo"),
    ("train mario", "There is no recipe 'mario': `podracer list recipes` names them."),
    (
        "train catch --clip-epsilon 0.1",
        "train catch has no flag --clip-epsilon: it belongs to --agent PPO.",
    ),
    ("train no_such_module:mine", "There is no module 'no_such_module'"),
    ("train os:getcwd", "must return an Experiment"),
    ("train catch --frmaes 10", "There is no flag --frmaes here: did you mean --frames?"),
    ("train cartpole_ppo --norm-adv", "did you mean --advantage-normalization?"),
    ("train --recipe cartpole_ppo", "'cartpole_ppo' is a recipe: write its name before the flags."),
    ("train catch_a2c --recipe own:mine", "'own:mine' is a recipe: write its name before"),
    ("train catch --resume RUN", "podracer resume RUN goes on with a run."),
    ("train cartpole_dqn --train-freq 4", "did you mean --rollout-length?"),
    ("train cartpole_dqn --exploration-fraction 0.1", "did you mean --agent.epsilon?"),
    (f"sweep {'1' * 400}", f"a name is too long for a file: {'1' * 60}..."),
    ("sweep catch --learning-rate 1e-3 1e-4", "for a sweep, --vary NAME=VALUE,VALUE."),
    ("sweep catch --vary optimizer.epsilom=1e-5", "did you mean optimizer.epsilon"),
    ("train catch --frames", "--frames needs a value: write it behind the flag"),
    ("train catch --track", "--track needs a value: write it behind the flag"),
    ("train atari_impala --game pnog", "pong"),
    ("train atari_impala --game PongNoFrameskip-v4", "write atari:pong instead"),
    # values of an experiment
    ("train catch --frames ten", "'ten' must be a whole number"),
    ("train catch --frames -5", "frames must be at least 1"),
    ("train catch --frames 1e18", "a run has at most 2,147,483,647 updates"),
    ("train catch --target-return nan", "target_return must be finite"),
    # values of an agent and a driver
    ("train catch_a2c --learning-rate 1e39", "learning_rate must be finite as a float32"),
    ("train catch_a2c --discount 2", "discount must lie in [0, 1]"),
    ("train catch --num-envs 1 --frames 3e10", "an environment makes at most 2,147,483,647 steps"),
    # what does not go together
    ("train catch --process-id 0", "together"),
    ("train catch --arch anakin --environment gymnasium:CartPole-v1", "take --driver sebulba"),
    ("sweep cartpole_sebulba --seeds 2", "train once for each --seed."),
    ("sweep catch_a2c --seeds 1000000000", "a sweep has at most 65,536 pods"),
    ("sweep catch_a2c --seed -3 --vary discount=0.8:0.9 --draws 1", "seed must be at least 0"),
    ("report nowhere --every nan", "--every must lie in"),
    ("list env", "KIND cannot be 'env': choose one of"),
    # files and directories
    ("check ring.py:Ring", "'ring.py' is a file: in its folder name the module, ring:Ring."),
    ("train catch --environment ring.py", "one of your own goes into a recipe"),
    ("train catch --run-dir runs/../../.x", "run name"),
    ("train catch --run-dir müller", "take 1 to 80 of A-Z, a-z, 0-9"),
    ("train catch --update-rule file", "is not an update rule"),
    ("resume nowhere", "nowhere holds no run: there is no such directory."),
    ("eval file", "file holds no run: it is a file."),
]
FILES = {  # of a user, in the working directory
    "broken.py": "def f(:\n",
    "unmet.py": "\n\nimport numpyy\n",
    "own.py": """
def nothing(): pass
def needs(x): pass
def raises(): return {}["x"]
def leaves(): raise SystemExit("done")
value = 3
def unbuilt():
    from podracer import A2C, AnakinConfig, Experiment
    return Experiment(environment="catch", agent=A2C, driver=AnakinConfig(), frames=9_999)
def undriven():
    from podracer import A2C, AnakinConfig, Experiment
    return Experiment(environment="catch", agent=A2C(), driver=AnakinConfig, frames=9_999)
def texted():
    from podracer import recipes
    return recipes.find("catch").with_fields({"driver": "anakin"})
""",
    "script.py": "import sys\n\nsys.exit(0)\n",
    "half.json": "{",
    "list.json": "[1]",
    "text.npz": "hello",
}
MISTAKES_IN_FILES = [
    (
        "train broken:f",
        "broken cannot be imported: SyntaxError: invalid syntax (broken.py, line 1).",
    ),
    ("train unmet:f", "cannot be imported: ModuleNotFoundError: No module named 'numpyy' (unmet.p"),
    ("train own.py:nothing", "'own.py' is a file: in its folder name the module, own:nothing."),
    ("train folder/own.py", "is a file: in its folder name the module, own:FUNCTION."),
    ("train own:nothing", "the recipe nothing must return an Experiment, not NoneType."),
    ("train own:raises", "the recipe own:raises raised KeyError: 'x' (own.py, line 4)."),
    (
        "play run --recipe own:needs",
        "gives it one, or add --x to `podracer train`, `sweep` or `eval`.",
    ),
    ("train script:f", "script cannot be imported: SystemExit: 0 (script.py, line 3)."),
    ("check script:f", "There is no environment 'script:f': SystemExit: 0 (script.py, line 3)."),
    ("train own:unbuilt", "Experiment.agent cannot be the class A2C: write A2C(...)."),
    ("train own:undriven", "Experiment.driver cannot be the class AnakinConfig: write Anak"),
    ("train own:texted", "Experiment.driver cannot be 'anakin': it must be"),
    ("train own:leaves", "the recipe own:leaves raised SystemExit: done (own.py, line 5)."),
    ("train catch --environment gymnasium:script:A-v0", "cannot be imported: SystemExit: 0"),
    ("train --frames 100 catch", "'catch' is a recipe: write its name before the flags."),
]
MISTAKES_ABOUT_A_RUN = [
    ("resume RUN --frames 0", "frames must be at least 1"),
    ("resume RUN --learning-rate 1", "podracer train RECIPE --learning-rate ... --weights RUN."),
    ("eval RUN --epsilon 2", "--epsilon must lie in [0, 1], but it is 2.0."),
    ("eval RUN --episodes 0", "--episodes must lie in [1, 1,048,576]"),
    ("play RUN --out /no/directory/film.gif", "there is no directory /no/directory"),
    ("rule RUN", "learned no update rule"),
    ("train catch --run-dir RUN", "already holds a run"),
    ("train RUN", "is a run: `podracer resume"),
]


@pytest.fixture
def refusal(outcome, monkeypatch):
    """Run a command that must be refused with a sentence; nothing may be computed or written."""
    monkeypatch.setattr(
        "podracer.devices.machine.num_cores", lambda: 0
    )  # the devices are initialized
    Path("file").touch()

    def check(command, message):
        code, text = outcome(*shlex.split(command))
        assert code == 78, text
        assert message in text
        assert text.startswith("podracer: ")
        assert text.endswith((".\n", "?\n", ".)\n"))
        assert text.count("\n") == 1
        assert {path.name for path in Path().iterdir()} <= {
            "file",
            "copy",
            "__pycache__",
            "own.npz",
            *FILES,
        }

    return check


@pytest.mark.figure(20)
class TestMistakes:
    @pytest.mark.parametrize(("command", "message"), MISTAKES)
    def test_a_mistake_is_a_sentence_and_code_78(self, command, message, refusal, monkeypatch):
        monkeypatch.setattr(
            "podracer.cli.pods.num_cores", lambda: 0
        )  # this process has its devices
        refusal(command, message)

    @pytest.mark.parametrize(("command", "message"), MISTAKES_IN_FILES)
    def test_a_mistake_in_a_file_of_ones_own_is_one(self, command, message, refusal, monkeypatch):
        monkeypatch.setattr("podracer.cli.pods.num_cores", lambda: 0)
        for name, text in FILES.items():
            Path(name).write_text(text)
        np.savez("own.npz", reward=np.zeros(3))
        monkeypatch.setattr(sys, "path", [*sys.path])
        refusal(command, message)
        for name in ("broken", "unmet", "own", "script"):
            sys.modules.pop(name, None)

    @pytest.mark.parametrize(("command", "message"), MISTAKES_ABOUT_A_RUN)
    def test_a_mistake_about_a_run_is_a_sentence_and_code_78(self, command, message, run, refusal):
        refusal(command.replace("RUN", str(run)).replace("FOLDER", str(run.parent)), message)


# --- files of a run -------------------------------------------------------------------------------


def with_config(**changes):
    """Change a run's configuration and seal it, as one who knows the format can."""

    def change(run):
        config = read_sealed_json(run / "config.json")
        seal_json(run / "config.json", {**config, **changes})

    return change


def with_experiment(**changes):
    def change(run):
        experiment = read_sealed_json(run / "config.json")["experiment"]
        with_config(experiment={**experiment, **changes})(run)

    return change


def with_text(name, text):
    return lambda run: (run / name).write_text(text)


def as_directory(name):
    def change(run):
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return change


def as_pipe(name):
    def change(run):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


HOSTILE = {
    "config no object": ("resume eval report", with_text("config.json", "[]")),
    "config empty": ("resume play report", with_text("config.json", "")),
    "config nested": ("resume eval report", with_text("config.json", "[" * 100_000)),
    "config directory": ("resume eval report fingerprint", as_directory("config.json")),
    "config pipe": ("resume eval report fingerprint", as_pipe("config.json")),
    "experiment list": ("resume eval report", with_config(experiment=[])),
    "recipe escape": ("resume eval", with_experiment(recipe="\x1b[2J")),
    "environment escape": ("resume eval", with_experiment(environment="gymnasium:\x1b]0;x\x07")),
    "agent nested": ("resume eval", with_experiment(agent=json.loads("[" * 400 + "]" * 400))),
    "frames negative": ("resume eval", with_experiment(frames=-1)),
    "frames huge": ("resume eval", with_experiment(frames=10**400)),
    "metrics directory": ("resume report", as_directory("metrics.jsonl")),
    "metrics pipe": ("resume report", as_pipe("metrics.jsonl")),
    "metrics nested": ("report", with_text("metrics.jsonl", "[" * 100_000 + "\n")),
    "metrics huge": ("report", with_text("metrics.jsonl", f'{{"updates": {10**400}}}\n')),
    "crash no object": ("report", with_text("crash.json", "[")),
    "lock directory": ("resume", as_directory("lock")),
    "lock pipe": ("resume", as_pipe("lock")),
}


@pytest.mark.figure(16)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_of_a_run_are_refused_with_a_sentence(name, run, outcome):
    commands, change = HOSTILE[name]
    change(run)
    before = sorted(path.name for path in run.iterdir())
    for command in commands.split():
        code, text = outcome(command, run)
        assert code in (65, 70, 73, 78), text
        assert text.startswith("podracer: ")
        assert "\x1b" not in text
        assert "\x07" not in text
    assert sorted(path.name for path in run.iterdir()) in (before, sorted([*before, "crash.json"]))


TOTALS = dataclasses.asdict(Totals())
METADATA = {
    "experiment": {}, "totals": TOTALS, "topologies": ["1 cpu"],
    "records": {"metrics.jsonl": {"size": 1, "sha256": "0"}},
}  # fmt: skip


@pytest.mark.figure(10)
@pytest.mark.parametrize(
    "change",
    [
        {"experiment": None}, {"experiment": []}, {"totals": []}, {"totals": {}},
        {"totals": {**TOTALS, "updates": -1}}, {"totals": {**TOTALS, "frames": "many"}},
        {"totals": {**TOTALS, "seconds": math.nan}}, {"totals": {**TOTALS, "seconds": None}},
        {"totals": {**TOTALS, "evaluation_return": "good"}}, {"totals": {**TOTALS, "more": 1}},
        {"topologies": None}, {"topologies": ["\x1b[2J"]}, {"topologies": [1]},
        {"versions": {}}, {"versions": ["1"]}, {"versions": [{"jax": "\x1b[2J"}]},
        {"records": None}, {"records": {"metrics.jsonl": 5}},
        {"records": {"metrics.jsonl": {"size": -1, "sha256": ""}}},
        {"best": 5}, {"best": {"updates": 5}}, {"best": {"updates": -5, "mean_return": 1.0}},
        {"best": {"updates": 5, "mean_return": math.inf}},
    ],
    ids=str,
)  # fmt: skip
def test_forged_metadata_of_a_checkpoint_is_refused(change):
    check_metadata(METADATA)
    check_metadata({**METADATA, "best": {"updates": 5, "mean_return": -1}})
    (name,) = change
    with pytest.raises(CheckpointError, match=f"the checkpoint's {name} cannot be those of a run"):
        check_metadata({**METADATA, **change})


# --- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag",
    [
        "--environment cartpole", "--coordinator localhost:1", "--num-processes 1",
        "--process-id 0", "--join-seconds 9", "--track wandb", "--frames 9", "--target-return None",
    ],
)  # fmt: skip
def test_a_resumed_tournament_refuses_what_it_would_not_read(flag, outcome, tmp_path):
    (tmp_path / "cup").mkdir()
    (tmp_path / "cup" / "leaderboard.jsonl").touch()
    code, text = outcome("resume", "cup", *flag.split())
    name = flag.split()[0]
    assert (code, f"a tournament goes on as it began: leave out {name}." in text) == (78, True)


def test_a_resumed_run_takes_other_settings_and_keeps_them(run, outcome):
    (run / "crash.json").write_text("{}")
    code, text = outcome("resume", run, "--frames", 3 * CHUNK, "--save-seconds", 7)
    assert code == 0, text
    assert "[resumed from update 10]" in text.splitlines()[0]
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


DAEMONS = """
import threading, time
import jax, numpy as np
from podracer.io import exits
from podracer.io.exits import exit_despite_threads

def sleep(x):
    time.sleep(0.002)
    return np.float32(x)

def act():
    while True:
        jax.block_until_ready(program(1.0))

program = jax.jit(lambda x: jax.pure_callback(sleep, jax.ShapeDtypeStruct((), "float32"), x))
program(1.0)
for _ in range(4):
    threading.Thread(target=act, daemon=True).start()
exits.THREAD_SECONDS = 0.1  # a compile that nobody awaits is not worth a word
threading.Thread(target=time.sleep, args=(60,), name=f"{exits.COMPILER}_0").start()
print("ended", end="")
exit_despite_threads(75)
"""


def test_daemons_in_native_code_do_not_change_the_exit_code():
    done = subprocess.run(
        [sys.executable, "-c", DAEMONS], capture_output=True, text=True, timeout=50, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(podracer.__file__).parents[1])},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (75, "ended", "")


OWN_RECIPE = """
from podracer import recipes


def mine(wide_network: bool = False, steps: int = 64, kind: list = ()):
    return recipes.find("catch_a2c").with_fields({"frames": steps, "keep_best": wide_network})
"""


LAKE = "gymnasium:FrozenLake-v1"


@pytest.mark.parametrize(
    ("recipe", "environment", "arch", "target"),
    [
        ("cartpole_ppo", LAKE, "sebulba", None),
        ("cartpole_ppo", "atari-sticky:pong", "sebulba", None),
        ("cartpole_ppo", "cartpole", "anakin", 475),
        ("cartpole_sebulba", "gymnasium:CartPole-v1", "sebulba", 475),
        ("best.json", LAKE, "sebulba", None),
    ],
)
def test_another_environment_has_its_own_architecture_and_no_target(
    recipe, environment, arch, target, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    saved = {"experiment": to_json(recipes.find("cartpole_ppo"))}
    (tmp_path / "best.json").write_text(json.dumps(saved))
    flags = ["--environment", environment]
    _, experiment, rest = find_experiment([recipe, *flags])
    assert (experiment.environment, experiment.arch, experiment.target_return) == (
        environment, arch, target,
    )  # fmt: skip
    options = TrainOptions()
    assert parse_experiment("train", rest, experiment, options)[1] == experiment
    rest += ["--target-return", "9"]
    assert parse_experiment("train", rest, experiment, options)[1].target_return == 9
    other = "sebulba" if arch == "anakin" else "anakin"
    _, experiment, rest = find_experiment([recipe, *flags, "--arch", other])
    assert parse_experiment("train", rest, experiment, options)[1].arch == other


def test_arguments_of_a_recipe_are_flags(tmp_path, monkeypatch, outcome):
    """They are spelled with hyphens, too, and shown in the help."""
    (tmp_path / "own_commands.py").write_text(OWN_RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for text, value in (("True", True), ("false", False)):
        for flag in (["--wide-network", text], [f"--wide_network={text}"]):
            experiment, rest = find_recipe("own_commands:mine", [*flag, "--seed", "3"])
            assert experiment.keep_best is value
            assert rest == ["--seed", "3"]
    for flags, words in (
        (["--wide-network", "perhaps"], "--wide-network: 'perhaps' must be true or false."),
        (["--steps", "many"], "--steps: 'many' must be a whole number, such as"),
        (["--kind", "x"], "--kind: 'x' must be list, which only Python gives."),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            find_recipe("own_commands:mine", flags)
    code, text = outcome("train", "own_commands:mine", "--help")
    assert code == 0
    assert "Flags of own_commands:mine itself: --wide-network, --steps, --kind." in " ".join(
        text.replace("│", " ").split()
    )


@pytest.mark.parametrize("command", ["report", "rule", "play", "record"])
def test_a_file_of_the_run_is_not_overwritten(command, run, outcome):
    before = (run / "config.json").read_bytes()
    code, text = outcome(command, run, "--out", run / "config.json")
    assert code == 78, text
    assert (run / "config.json").read_bytes() == before


@dataclasses.dataclass(frozen=True)
class Two:
    first: Annotated[str, Mark.POSITIONAL]
    second: Annotated[str, Mark.POSITIONAL]


def test_a_missing_argument_is_named_with_the_whole_usage():
    with pytest.raises(ConfigError, match="needs SECOND: write podracer pair FIRST SECOND"):
        parse(Two, "pair", ["a"])


def needing(depth: int, deep: bool = False):
    return dataclasses.replace(recipes.find("catch_a2c"), seed=100 * deep + depth)


def test_a_recipe_may_need_options_that_its_files_do_not_have(monkeypatch):
    entry = EntryPoint("needing", f"{__name__}:needing", "podracer.recipes")
    monkeypatch.setattr(recipes, "installed", lambda kind: {"needing": entry})
    for flags, seed in (["--deep"], 103), (["--deep", "--no-deep"], 3), ([], 3):
        assert find_recipe("needing", ["--depth", "3", *flags])[0].seed == seed
    assert recipes.lender(None, "needing") is None  # such runs are opened without it


def loud(arguments):
    print("loud")
    print_json({"steps": (np.float32(0.5), math.nan)})


def test_stdout_of_a_command_with_json_has_its_result_alone(monkeypatch, capsys):
    entry = EntryPoint("loud", f"{__name__}:loud", "podracer.commands")  # as of a package
    monkeypatch.setattr("podracer.cli.main.installed", lambda kind: {"loud": entry})
    for flags, out, error in (["--json"], "", "loud\n"), ([], "loud\n", ""):
        with pytest.raises(SystemExit, match="0"):
            main(["loud", *flags])
        assert capsys.readouterr() == (out + '{"steps": [0.5, null]}\n', error)
    listing = (
        "import os; from podracer.cli import listing, main; "
        "listing._rows = lambda kind: os.write(1, b'low') and {}; main.main()"  # as code in C does
    )
    command = [sys.executable, "-c", listing, "list", "agents", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ('{"agents": []}\n', "low")


def test_a_device_is_not_replaced(run, outcome, tmp_path):
    """The superuser could."""
    device = tmp_path / "device.html"
    os.mkfifo(device)
    code, text = outcome("report", run, "--out", device)
    assert (code, "is not a regular file" in text) == (78, True)
    assert device.is_fifo()


def test_resume_has_a_flag_for_every_setting_that_may_change():
    settings = {setting.path: setting for setting in settings_of(free_settings())}
    assert settings.keys() == FREE_ON_RESUME
    assert {setting.value for setting in settings.values()} == {"unchanged"}
    assert settings["target_return"].read(["None"]) is None  # a value to change it to
