"""Sentences in the words of the command line, about fields and about what its parser refuses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from podracer.names import nearest

# Fields of no part that errors and warnings name; those of a part are `agent.discount`.
FIELD_NAMES = (
    "attach", "coordinator", "devices", "draws", "engine", "environment", "evaluation_episodes",
    "evaluation_epsilon", "evaluation_policy", "evaluations", "format", "frames", "join_seconds",
    "max_seconds", "num_processes", "pod_cpus", "pod_gpus",
    "prices", "process_id", "recipe", "seed", "selection", "size", "target_return", "track",
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
_DEVICE = "JAX takes an accelerator by itself, and JAX_PLATFORMS=cpu before the command the CPU."
_OF_OTHERS = {  # flags of other libraries that are no setting here
    **dict.fromkeys(("gpu", "cuda", "device", "use-gpu", "no-gpu", "cpu", "tpu"), _DEVICE),
    **{name: f"write --track {name}." for name in ("wandb", "trackio", "mlflow")},
    "mirror": "write --attach mirror:ADDRESS.",
    "tensorboard": "every run writes its curves for TensorBoard into its directory.",
}
_QUOTES = "'\""
_KINDS = {
    "FLOAT": "a number",
    "INT": "a whole number",
    "PATH": "a path",
}  # what tyro's help pages call types
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


def unexpected(arguments: Sequence[str], command: str, flags: Iterable[str]) -> str:
    """Return the sentence about arguments that a command does not take, with the nearest flag."""
    page = f"`podracer {command} --help` lists what there is."
    first = next((x for x in arguments if re.match(r"--?[a-zA-Z]", x)), arguments[0])
    if (name := first.partition("=")[0].lstrip("-")) in _OF_OTHERS and first.startswith("-"):
        return f"There is no flag {first.partition('=')[0]} here: {_OF_OTHERS[name]}"
    if first.startswith("-"):
        flag, names = first.partition("=")[0], [x.removeprefix("--") for x in flags]
        name = flag.lstrip("-").replace("_", "-")
        hint = nearest(name.removeprefix("no-"), names, page).replace("mean ", "mean --")
        return f"There is no flag {flag} here: {hint.replace(' or ', ' or --')}"
    return f"{first!r} is none of the arguments of {command}: {_switch_advice(first) or page}"


def no_setting(text: str) -> str:
    """Return the sentence about an argument that stands where settings do, and is none."""
    advice = _switch_advice(text) or (
        "write FIELD=VALUE, such as agent.learning_rate=1e-3; several values are for a sweep, "
        "--vary NAME=VALUE,VALUE."
    )
    return f"{text!r} is no setting: {advice}"


def _switch_advice(text: str) -> str:
    is_switch = text.lower() in ("true", "false", "yes", "no", "on", "off")
    return "a flag that is on or off has no value: write --NAME or --no-NAME." if is_switch else ""


def of_parser(box: str, command: str, name: str = "") -> str:
    """Return what tyro says in a box as one sentence, with the `name` of a flag if it has none."""
    rows = [row.strip("│").rstrip() for row in box.splitlines()[1:-1]]  # between title and edge
    is_ruled = rows[:1] and not rows[0].strip(" -")  # a title in ASCII
    head = list(itertools.takewhile(lambda row: row.strip(" ─-"), rows[1 if is_ruled else 0 :]))
    text = " ".join(" ".join(head).split())
    if text.startswith("Missing from"):
        missing = " ".join(row.strip() for row in head if re.match(r" {5,6}\S", row))
        return f"{command} needs {missing}: write podracer {command} {missing}."
    if match := re.match(r"Missing value for argument '(.+?)'", text):
        return f"{match[1]} needs a value: write it behind the flag, or leave it out."
    if match := re.match(r"invalid choice '(.*)' for argument '(.+)'\. Expected .*\((.+)\)", text):
        choices = nearest(match[1], sorted(re.findall(r"'([^']+)'", match[3])))
        return f"{name or match[2]} cannot be {match[1]!r}: {choices}"
    if match := re.match(r"Error parsing (\S+?): (.+)", text):
        return f"{name or match[1]}: {_of_value(match[2])}"
    return text or " ".join(box.split())


def _of_value(text: str) -> str:
    """Return the sentence about a value that its type refused, in place of Python's or tyro's."""
    if match := re.fullmatch(r"could not convert string to float: (.+)", text):
        return f"{match[1]} must be a number."
    if match := re.fullmatch(r"no type matching (.+) could be instantiated from \[(.+)\]\.", text):
        kinds: list[str] = re.findall(r"[^{}|,]+", match[1])
        return f"{match[2]} must be {' or '.join(_KINDS.get(kind, kind) for kind in kinds)}."
    return text
