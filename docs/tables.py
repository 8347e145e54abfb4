"""The pages that are made from the code.

`build.py` makes `environments.md` from the catalog and `settings.md` from every recipe, for the site alone.
`python docs/tables.py` writes `api/packages.md`, from the imports of the packages, and their names for messages of the
core, from their entry points; `tests/project/test_tables.py` fails where one is not current.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
import tomllib
from collections import defaultdict
from pathlib import Path

from podracer import envs, recipes
from podracer.cli.settings import settings_of
from podracer.cli.values import format_value
from podracer.envs.catalog import ADAPTERS, ENVIRONMENTS

DOCS = Path(__file__).parent
NAMES = DOCS.parent / "podracer" / "io" / "packages.json"
SUITE = DOCS.parent / "benchmarks" / "results" / "suite.jsonl"
MADE = "<!-- Made by docs/tables.py. -->\n\n"
# Megabytes of wheels that an extra adds to the core, for Linux and Python 3.11, by
# `pip install --dry-run --report - ".[EXTRA]"` in November 2026.
MEGABYTES = {"atari": 4, "gymnasium": 1}
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
environment by default. `scored` lists the names with scores over seeds in [results](../benchmarks/results.md); the others run in
tests, and their scores are not known.

{kinds}
## Descriptions

{texts}
MuJoCo's tasks of Gymnasium need the extra `mujoco` (27 MB) as well.
Eight suites in JAX, such as gymnax, brax and Craftax, are in [a package](../packages/environments/README.md).
Environments of your own need no name: [add an environment](add-an-environment.md).
"""


def words_of(setting):
    """The word of a command that gives a setting its value."""
    if setting.hint is bool:
        return setting.flag if setting.value else f"--no-{setting.flag[2:]}"
    return f"{setting.flag} {format_value(setting.value)}".rstrip()


def has_flag(setting):
    """Whether a setting belongs to the complete command of a recipe."""
    is_of_run = "." not in setting.path
    is_empty = setting.value in ("", ()) or (setting.value is None and bool(setting.choices))
    return not (setting.is_part or is_empty or (is_of_run and setting.path not in RUN_FIELDS))


def command(name):
    """The complete command of a recipe: each flag of its agent and driver with its value."""
    words = [words_of(x) for x in settings_of(recipes.find(name)) if has_flag(x)]
    lines = textwrap.wrap(
        " ".join(word.replace(" ", "\0") for word in words), 100, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
    return " \\\n  ".join([f"podracer train {name}", *(x.replace("\0", " ") for x in lines)])


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
        for setting in settings_of(experiment):
            if "." in setting.path and not setting.is_part:
                owner = agent if setting.path.startswith("agent") else experiment.arch
                texts.setdefault((setting.flag, setting.text), set()).add(owner)
    of_flag = {}
    for flag, _ in texts:
        of_flag[flag] = of_flag.get(flag, 0) + 1
    rows = [
        [code([flag]), " ".join(text.split()).replace("|", "\\|"),
         ", ".join(sorted(owners)) if of_flag[flag] > 1 else ""]
        for (flag, text), owners in sorted(texts.items())
    ]  # fmt: skip
    return f"""{MADE}# Settings of every recipe

Each block is the recipe with every value written out: the command does what `podracer train RECIPE` does, on a CPU.
Flags that are the same in all recipes, such as `--seed`, are left out. `podracer train RECIPE --help` shows them all with
their texts. A flag is the path of a field in Python, or the end of that path: `--agent.learning-rate 1e-3` or
`--learning-rate 1e-3` is `podracer.train("catch", agent={{"learning_rate": 1e-3}})`.

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


def packages():
    users = defaultdict(lambda: defaultdict(set))  # of each name of each module
    for path in (DOCS.parent / "packages").glob("*/podracer_*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == "podracer"
            ):
                for alias in node.names:
                    users[node.module][alias.name].add(path.relative_to(DOCS.parent).parts[1])
    written = "".join(x.read_text() for x in (DOCS / "api").glob("*.md") if x.stem != "packages")
    reference = set(re.findall(r"^\.\. auto\w+:: podracer\.(?:.*\.)?(\w+)$", written, re.M))
    rows = [
        [f"`{module}.{name}`", what(importlib.import_module(module), name), ", ".join(sorted(used))]
        for module, names in sorted(users.items())
        for name, used in sorted(names.items())
        if name not in reference
    ]
    return PACKAGES + table(["name", "what it is", "used by"], rows)


def names_of_packages():
    names = {}
    for path in sorted((DOCS.parent / "packages").glob("*/pyproject.toml")):
        groups = tomllib.loads(path.read_text())["project"].get("entry-points", {})
        found = {x for kind, group in groups.items() if kind != "podracer.reports" for x in group}
        names[path.parent.name] = sorted(found)
    return json.dumps(names, indent=1) + "\n"


def what(module, name):
    """The first line of a docstring; of a constant its value or its class."""
    found = getattr(module, name, None) or importlib.import_module(f"{module.__name__}.{name}")
    if inspect.isclass(found) or inspect.isroutine(found) or inspect.ismodule(found):
        return (inspect.getdoc(found) or "").partition("\n")[0]
    text = repr(found)
    return f"`{text}`" if len(text) < 60 and "<" not in text else f"a {type(found).__name__}"


PACKAGES = (
    MADE
    + """# Names for packages

The names of the core that its [packages](../../packages/README.md) import beside those of the other pages: a stranger's package may
use them in the same way. Each has a docstring, which says more than its first line here.

Stability: any version may rename or remove a name of this page, as the packages are released with the core and pin its version.

"""
)

OF_THE_SITE = {"docs/environments.md": environments, "docs/settings.md": settings}


def main():
    (DOCS / "api" / "packages.md").write_text(packages())
    NAMES.write_text(names_of_packages())


if __name__ == "__main__":
    main()
