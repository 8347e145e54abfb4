"""The pages that are made from the code: `python docs/tables.py` writes them again.

`which-recipe.md` asks the agents what they can be built for, `environments.md` the catalog,
`settings.md` every recipe. `tests/project/test_tables.py` fails where a page is not current.
"""

import dataclasses
import json
import textwrap
import typing
from pathlib import Path

from podracer import envs, recipes
from podracer.agents import AGENTS
from podracer.cli.flags import Group, fields_of, group_of, names_of_command
from podracer.cli.values import format_schedule
from podracer.envs.catalog import ACTIONS, ADAPTERS, ENVIRONMENTS, OBSERVATIONS, spaces_of
from podracer.recipes.fitting import can_build, fitting
from podracer.schedules import Linear

DOCS = Path(__file__).parent
SUITE = DOCS.parent / "benchmarks" / "results" / "suite.jsonl"
MADE = "<!-- Made by docs/tables.py. -->\n\n"
# Megabytes of wheels that an extra adds to the core, for Linux and Python 3.11, by
# `pip install --dry-run --report - ".[EXTRA]"` in November 2026.
MEGABYTES = {"atari": 4, "envpool": 316, "gymnasium": 1, "gymnax": 32, "pgx": 1}
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


def which_recipe():
    rows = [
        [code([name]), code(observations(kind())), code(actions(kind()))]
        for name, kind in sorted((kind.__name__, kind) for kind in AGENTS.values())
    ]
    text = f"""{MADE}# Which recipe for my task

Look at what your environment shows and which actions it takes:

```bash
podracer list recipes --observation image --action continuous
podracer list environments --observation vector --action continuous
podracer check MODULE:NAME                              # the faults of your own environment
```

| word | observations |
|---|---|
| `vector` | an array of numbers |
| `image` | an array `[H, W, C]` |
| `index` | the number of a state |
| `dict` | several arrays |

Actions are `discrete` (one of several), `multidiscrete` (several of them at once) or `continuous` (numbers in bounds).

Take a recipe in an environment of this kind and name yours with `--environment`, or in a [recipe of your
own](add-an-agent.md#on-the-command-line). The lists below have one recipe for each algorithm or variant, first those that
need no flag but this one. `--torso cnn` gives an agent convolutions. Its settings are those of its own task: see
[settings](settings.md), and begin with the learning rate in a [sweep](tutorials/06-sweep.md).

Where several fit, ask what a frame costs. A2C, PPO, IMPALA and PQN learn from fresh rollouts, so they suit many cheap
environments. DQN, SAC and TD3 learn from a replay: fewer frames, more computation for each. MuZero and AlphaZero
plan, which is the most computation for a frame. R2D2 and `--memory lstm` are for tasks that hide something.
[Results](results.md) has the scores of most.

"""
    for observation in OBSERVATIONS:
        for action in ACTIONS:
            fits = fitting(recipes.RECIPES, observation, action)
            own = [fit.name for fit in fits if not fit.elsewhere]
            text += f"## {observation}, {action}\n\n"
            text += f"In such an environment: {code(own) or 'none'}.\n\n"
            for torso in (None, "cnn"):
                names = [x.name for x in fits if x.elsewhere and x.torso == torso]
                flags = "--environment NAME" + (f" --torso {torso}" if torso else "")
                text += f"With `{flags}`: {code(names)}.\n\n" if names else ""
    text += "## Agents\n\nWhat each agent can be built for, with its default settings:\n\n"
    text += table(["agent", "observations", "actions"], rows)
    return text + (
        "\nDisco needs the file of a rule, "
        "and LPG\nneeds `lifetimes:NAME`, so they can be built for no task alone.\n"
    )


def observations(agent):
    return [x for x in OBSERVATIONS if any(can_build(agent, x, action) for action in ACTIONS)]


def actions(agent):
    return [x for x in ACTIONS if any(can_build(agent, kind, x) for kind in OBSERVATIONS)]


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

        spaces = spaces_of(name)
        extra = adapter.extra if adapter else ""
        rows.append(
            [
                code([name]),
                ", ".join(spaces.observation),
                ", ".join(spaces.action),
                "host" if adapter and adapter.on_host else "device",
                f"`{extra}`" if extra else "",
                MEGABYTES[extra] if extra else "",
                code(x for x, environment in named.items() if of_prefix(environment)),
                code(x.removeprefix(prefix) or x for x in scored if of_prefix(x)),
            ]
        )
    head = ["name", "observations", "actions", "runs on", "extra", "MB", "recipes", "scored"]
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

`podracer list environments` shows the names and what is installed on your machine, with `--observation` and `--action`
only those of a kind ([words](which-recipe.md)). `podracer.make(NAME)` returns one, and
`podracer train RECIPE --environment NAME` trains in it.

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


PAGES = {"which-recipe": which_recipe, "environments": environments, "settings": settings}


def main():
    for name, make in PAGES.items():
        (DOCS / f"{name}.md").write_text(make())


if __name__ == "__main__":
    main()
