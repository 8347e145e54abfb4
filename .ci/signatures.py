"""The signatures of the public names, compared with the last release: `python .ci/signatures.py`.

Public is what a page of `docs/api/` names. Breaks are named: a name or an argument that is gone, a
new argument without a default, an argument that is no longer positional. They fail where the
version is of the same minor release as the record. `--record` writes it, after a release.
"""

import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path

import podracer

ROOT = Path(__file__).parents[1]
RECORD = ROOT / ".ci" / "signatures.json"
NAME = re.compile(r"^\.\. auto\w+:: (\S+)$", re.M)


def public_things():
    """Yield the path of each public thing and the thing, methods of classes included."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for path in NAME.findall(page.read_text()):
            thing = pkgutil.resolve_name(path)
            if not inspect.ismodule(thing):
                yield path, thing
                continue
            for name, member in vars(thing).items():
                if not name.startswith("_") and getattr(member, "__module__", "") == path:
                    yield f"{path}.{name}", member


def arguments(thing):
    """Return [name, kind, is it required] of each argument, None of what cannot be called."""
    if not callable(thing):
        return None
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        return None
    return [[x.name, x.kind.name, x.default is x.empty] for x in parameters]


def signatures():
    """Return the arguments of all public things by their paths."""
    table = {}
    for path, thing in public_things():
        table[path] = arguments(thing)
        for name, member in vars(thing).items() if isinstance(thing, type) else ():
            if not name.startswith("_") and callable(member):
                table[f"{path}.{name}"] = arguments(member)
    return table


def breaks(old, new):
    """Yield a sentence on each signature of `old` that calls of `new` may not fit."""
    for path, before in old.items():
        if path not in new:
            yield f"{path} is gone"
            continue
        after = {name: (kind, required) for name, kind, required in new[path] or ()}
        if any(kind.startswith("VAR") for kind, _ in after.values()) or before is None:
            continue
        known = {name for name, _, _ in before}
        for name, kind, _ in before:
            if name not in after:
                yield f"{path} has no argument {name} any more"
            elif kind == "POSITIONAL_OR_KEYWORD" and after[name][0] == "KEYWORD_ONLY":
                yield f"the argument {name} of {path} must be given by name"
        for name, (_, required) in after.items():
            if required and name not in known:
                yield f"{path} needs a new argument {name}"


def main():
    """Compare, or record."""
    new = signatures()
    if "--record" in sys.argv:
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(new.items()))
        version = json.dumps(podracer.__version__)
        RECORD.write_text(f'{{"version": {version}, "signatures": {{\n{lines}\n}}}}\n')
        return 0
    if not RECORD.exists():
        print(f"{len(new)} signatures, and none of a release yet: --record writes them after one")
        return 0
    record = json.loads(RECORD.read_text())
    found = list(breaks(record["signatures"], new))
    added = len(new.keys() - record["signatures"].keys())
    print(f"{len(new)} signatures, {added} new since {record['version']}, {len(found)} breaks")
    print(*(f"  {sentence}" for sentence in found), sep="\n")
    same = record["version"].rpartition(".")[0] == podracer.__version__.rpartition(".")[0]
    return 1 if found and same else 0


if __name__ == "__main__":
    sys.exit(main())
