"""Sentences about fields in the words of the command line."""

from __future__ import annotations

import re

# Fields of no part that errors and warnings name; those of a part are `agent.discount`.
FIELD_NAMES = (
    "attach", "coordinator", "devices", "draws", "engine", "environment", "evaluation_episodes",
    "evaluation_epsilon", "evaluation_policy", "evaluations", "format", "frames", "join_seconds",
    "max_seconds", "num_processes", "pod_cpus", "pod_gpus", "prices", "process_id", "recipe",
    "seed", "selection", "size", "target_return", "track", "weights",
)  # fmt: skip
_PARTS = ("agent", "driver")
_FLAGS = {  # those that are not named as their fields
    "agent.rule_file": "--update-rule",
    "exchange.every": "--every",
    "exchange.peers": "--average",
    "exchange.rule": "--select",
    "exchange.rule.bounds": "--vary NAME=LOW:HIGH and --draws",
}
_QUOTES = "'\""
_FIELD = re.compile(r"`(?P<path>[a-z_.]+)(?:=(?P<value>[^`]+))?`")
_PART = re.compile(r"podracer\.(?:networks\.)?(\w+?)(?:Config)?\(\)")  # such as `AnakinConfig()`


def in_flags(sentence: str) -> str:
    """Return a sentence in what the user gave: flags for `field`, `part.field` and `field=value`.

    Addresses stand in the places of the copies of runs.
    """
    from podracer.io.addresses import in_addresses

    return _FIELD.sub(_flag, in_addresses(sentence))


def _flag(match: re.Match[str]) -> str:
    path, value = match["path"], match["value"]
    if not (path in _FLAGS or path in FIELD_NAMES or path.partition(".")[0] in _PARTS):
        return match[0]
    flag = _FLAGS.get(path, f"--{path.replace('_', '-')}")
    if value == "False":
        return f"--no-{flag.removeprefix('--')}"
    if value in (None, "True"):
        return flag
    part = _PART.fullmatch(value)
    return f"{flag} {part[1].lower() if part else value.strip(_QUOTES)}"
