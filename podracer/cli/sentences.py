"""Sentences about fields, as Python users know them, in the words of the command line."""

from __future__ import annotations

import re

# Fields of no part that errors and warnings name; those of a part are `agent.discount`.
FIELD_NAMES = (
    "anchor", "coordinator", "devices", "draws", "engine", "environment", "evaluation_episodes",
    "evaluation_epsilon", "evaluation_policy", "evaluations", "format", "frames", "join_seconds",
    "matches", "mirror", "num_processes", "opponents", "pod_cpus", "pod_gpus", "prices",
    "process_id", "recipe", "seed", "selection", "size", "target_return", "track", "train_against",
    "weights",
)  # fmt: skip
_PARTS = ("agent", "driver", "exchange")
_FLAGS = {  # those that are not named as their fields
    "driver=podracer.AnakinConfig()": "--arch anakin",
    "driver=podracer.SebulbaConfig()": "--arch sebulba",
    "agent.network=podracer.TorsoNetwork(podracer.networks.CNN())": "--torso cnn",
    "agent.network=podracer.TorsoNetwork(podracer.networks.ResNet())": "--torso resnet",
    "agent.rule_file": "--update-rule",
    "exchange.peers": "--average",
    "exchange.rule": "--select",
    "exchange.rule.bounds": "--vary NAME=LOW:HIGH and --draws",
}
_QUOTES = "'\""
_FIELD = re.compile(r"`(?P<path>[a-z_.]+)(?:=(?P<value>[^`]+))?`")


def in_flags(sentence: str) -> str:
    """Return a sentence with the flags in the places of `field`, `part.field` and `field=value`."""
    return _FIELD.sub(_flag, sentence)


def _flag(match: re.Match[str]) -> str:
    assignment, path, value = match[0].strip("`"), match["path"], match["value"]
    part, _, name = path.rpartition(".")
    if assignment in _FLAGS:
        return _FLAGS[assignment]
    if path not in _FLAGS and part.partition(".")[0] not in _PARTS and path not in FIELD_NAMES:
        return match[0]
    flag = _FLAGS.get(path, f"--{name.replace('_', '-')}")
    if value == "False":
        return f"--no-{flag.removeprefix('--')}"
    return flag if value in (None, "True") else f"{flag} {value.strip(_QUOTES)}"
