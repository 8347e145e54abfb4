"""The pages that are made from the code: `python docs/tables.py` writes them again.

`environments.md` asks the catalog, `settings.md` every recipe. `tests/project/test_tables.py` fails where a page is not current.
"""

import dataclasses
import json
import textwrap
import typing
from pathlib import Path

from podracer import envs, recipes
from podracer.cli.flags import Group, fields_of, group_of, names_of_command
from podracer.cli.values import format_schedule
from podracer.envs.catalog import ADAPTERS, ENVIRONMENTS
from podracer.schedules import Linear

DOCS = Path(__file__).parent
SUITE = DOCS.parent / "benchmarks" / "results" / "suite.jsonl"
MADE = "<!-- Made by docs/tables.py. -->\n\n"
# Megabytes of wheels that an extra adds to the core, for Linux and Python 3.11, by
# `pip install --dry-run --report - ".[EXTRA]"` in November 2026.
MEGABYTES = {"atari": 4, "gymnasium": 1, "gymnax": 32, "pgx": 1}
# Fields of an experiment that make a run what it is; the others are the same in all recipes.
RUN_FIELDS = (
    "frames", "evaluations", "evaluation_episodes", "evaluation_policy", "evaluation_epsilon",
    "target_return",
)  # fmt: skip


def table(head, rows):
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def code(names):
    return ", ".join(f"`{name}`" for name in names)


def environments():
    suite = [json.loads(line) for line in SUITE.read_text().splitlines()]
    scored = sorted({row["environment"] for row in suite if row["library"] == "podracer"})
    named = {name: recipes.find(name).environment for name in recipes.RECIPES}
    rows = []
    for name in [*ENVIRONMENTS, *(f"{prefix}:NAME" for prefix in ADAPTERS)]:
        adapter = ADAPTERS.get(name.partition(":")[0])
        prefix = name.removesuffix("NAME")

        def of_prefix(environment, prefix=prefix, is_family=adapter is not None):
            return environment.startswith(prefix) if is_family else environment == prefix

        extra = adapter.extra if adapter else ""
        rows.append(
            [
                code([name]),
                "host" if adapter and adapter.on_host else "device",
                f"`{extra}`" if extra else "",
                MEGABYTES[extra] if extra else "",
                code(x for x, environment in named.items() if of_prefix(environment)),
                code(x.removeprefix(prefix) or x for x in scored if of_prefix(x)),
            ]
        )
    head = ["name", "runs on", "extra", "MB", "recipes", "scored"]
    kinds = table(head, rows)
    texts = table(
        ["name", "what it is"],
        [
            [code([name]), text]
            for name, text, _ in sorted(envs.names())
            if name.removesuffix(":NAME") in {*ENVIRONMENTS, *ADAPTERS}
        ],
    )
    return f"""{MADE}# Environments

`podracer list environments` shows the names and what is installed on your machine. `podracer.make(NAME)` returns one,
and `podracer train RECIPE --environment NAME` trains in it.

Environments of the device are written in JAX and step inside the compiled program, thousands side by side. Environments
of the host are stepped by processes or native threads, under [Sebulba](sebulba.md). `MB` is the size of the wheels that the extra
downloads besides podracer's own, on Linux with Python 3.11: `pip install -e ".[EXTRA]"` in the clone. Recipes train in the
environment by default. `scored` lists the names with scores over seeds in [results](results.md); the others run in
tests, and their scores are not known.

{kinds}
## Descriptions

{texts}
MuJoCo's tasks of Gymnasium need the extra `mujoco` (27 MB) as well.
Seven suites in JAX, such as brax, jumanji and Craftax, are in [a package](../packages/environments/README.md).
Environments of your own need no name: [add an environment](add-an-environment.md).
"""


def words_of(flag, value):
    """The words of a command that set a flag to a value."""
    if isinstance(value, bool):
        path, _, name = flag.rpartition(".")
        return [f"--{flag}" if value else f"--{path}{'.' * bool(path)}no-{name}"]
    if isinstance(value, tuple):
        return [" ".join([f"--{flag}", *map(str, value)])]
    return [f"--{flag} {format_schedule(value) if isinstance(value, Linear) else value}"]


def command(name):
    """The complete command of a recipe: each flag of its agent and driver with its value."""
    experiment = recipes.find(name)
    run = [x for x in fields_of(experiment) if x.name in RUN_FIELDS]
    parts = {"agent": experiment.agent, experiment.arch: experiment.driver}
    groups = {"run": Group("", run)} | {title: group_of(part) for title, part in parts.items()}
    words = [
        word
        for path, flag in names_of_command(groups).items()
        if not has_no_flag(*value_at(experiment, path))
        for word in words_of(flag, value_at(experiment, path)[1])
    ]
    lines = textwrap.wrap(
        " ".join(word.replace(" ", "\0") for word in words), 100, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
    return " \\\n  ".join([f"podracer train {name}", *(x.replace("\0", " ") for x in lines)])


def value_at(experiment, path):
    """The type of a field and its value."""
    title, *names = path
    part = {"run": experiment, "agent": experiment.agent}.get(title, experiment.driver)
    for name in names[:-1]:
        part = getattr(part, name)
    return typing.get_type_hints(type(part))[names[-1]], getattr(part, names[-1])


def has_no_flag(kind, value):
    """Whether a field is None in the place of a part, or an empty text."""
    kinds = typing.get_args(kind)
    is_part = any(dataclasses.is_dataclass(x) or getattr(x, "_is_protocol", False) for x in kinds)
    return value == "" or (value is None and is_part)


def leaves(part):
    """Yield (flag, text) of all fields of a part, at any depth."""
    for field in fields_of(part):
        if field.is_part:
            yield from leaves(field.value)
        else:
            yield field.flag, field.text or ""


def settings():
    sections, texts = "", {}
    for name in sorted(recipes.RECIPES):
        experiment, sized = recipes.find(name), recipes.accelerator_changes(name)
        agent = type(experiment.agent).__name__
        environment = experiment.environment
        sections += f"### {name}\n\n{recipes.RECIPES[name].__doc__.splitlines()[0]}\n\n"
        sections += f"{agent} in `{environment}` under {experiment.arch.title()}:\n\n"
        sections += f"```bash\n{command(name)}\n```\n\n"
        if sized:
            sections += f"On an accelerator: {code(changes(sized))}.\n\n"
        for owner, part in ((agent, experiment.agent), (experiment.arch, experiment.driver)):
            for flag, text in leaves(part):
                texts.setdefault((flag, text), set()).add(owner)
    of_flag = {}
    for flag, _ in texts:
        of_flag[flag] = of_flag.get(flag, 0) + 1
    rows = [
        [code([f"--{flag}"]), " ".join(text.split()).replace("|", "\\|"),
         ", ".join(sorted(owners)) if of_flag[flag] > 1 else ""]
        for (flag, text), owners in sorted(texts.items())
    ]  # fmt: skip
    return f"""{MADE}# Settings of every recipe

Each block is the recipe with every value written out: the command does what `podracer train RECIPE` does, on a CPU.
Flags that are the same in all recipes, such as `--seed`, are left out. `podracer train RECIPE --help` shows them all with
their texts. In Python a flag is a field: `podracer.train("catch", agent={{"learning_rate": 1e-3}})`.

## Recipes

{sections}## What the flags mean

The last column names the owners where several have a flag of this name.

{table(["flag", "meaning", "of"], rows)}"""


def changes(values, path=()):
    """The fields of a size, as `part.field=value`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from changes(value, (*path, name))
        else:
            value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
            yield f"{'.'.join((*path, name))}={value}"


PAGES = {"environments": environments, "settings": settings}


def main():
    for name, make in PAGES.items():
        (DOCS / f"{name}.md").write_text(make())


if __name__ == "__main__":
    main()
