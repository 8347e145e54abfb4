"""The table of commands. Imports nothing that is slow: a mistyped one is answered at once."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command: the file of `podracer.cli` and the function that run it, and its line of help.

    The flags of `eval` are the dataclass `EvalOptions` of that file, and so on.
    """

    module: str
    function: str
    usage: str
    summary: str


COMMANDS = {
    "train": Command("train", "train", "[RECIPE] [--flags]", "train an agent (default: catch)"),
    "sweep": Command("pods", "sweep", "[RECIPE] --vary ...", "many settings and seeds at once"),
    "tournament": Command("pods", "tournament", "[RECIPE ...]", "pods that restart from the best"),
    "leaderboard": Command("leaderboard", "leaderboard", "DIR", "the best pods, ranked"),
    "resume": Command("resume", "resume", "RUN", "continue a run exactly, to its configured end"),
    "eval": Command("runs", "evaluate", "RUN", "whole episodes at a checkpoint"),
    "play": Command("runs", "play", "RUN", "episodes as a GIF or a video"),
    "report": Command("runs", "report", "RUN [RUN ...]", "one HTML page; several runs compare"),
    "list": Command("listing", "list_names", "[WHAT]", "agents, environments or recipes"),
    "init": Command("init", "init", "NAME", "a package with an agent and an environment of yours"),
    "check": Command("check", "check", "ENVIRONMENT", "what is wrong with an environment"),
    "fingerprint": Command("runs", "fingerprint", "RUN", "SHA-256 of the whole training state"),
    "rule": Command("runs", "rule", "RUN", "the update rule that a run learned, as a file"),
    "completion": Command("completion", "completion", "", "completions for bash and zsh"),
    "doctor": Command("doctor", "doctor", "", "devices and versions, and a test of what works"),
}
LEFT = {  # what is no command, and what is instead
    "bench": "run `python benchmarks/bench.py` in the clone of podracer.",
    "version": "did you mean podracer --version?",
}
# Their flags depend on a recipe or a rule, so their functions take the arguments, not the options.
TAKE_ARGUMENTS = ("train", "sweep", "tournament", "resume", "eval")
