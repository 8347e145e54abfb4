"""The notebooks in `examples/notebooks`: their stored outputs are whole, and their cells run.

They are executed in order as a plain program, which needs no kernel.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What each prints that could be wrong: a pattern with a number, and the least number.
LEAST = {
    "01_anakin": {
        r"return of the last updates (\S+),": 0.9,
        r"greedy return (\S+) in 100 episodes": 0.9,
    },
    "02_sebulba": {
        r"at last (\d+)": 100.0,
        r"greedy return (\d+), the most possible is 500": 200.0,
    },
    "03_your_environment": {
        r"the best action in (\d+)% of the cells": 80.0,
        r"mean return (\S+)": -12.0,
    },
    "04_tournament": {r"\n +\d +\d +(\d+) \d\.\de": 400.0},
}
SAYS = {
    "02_sebulba": "equal to the bit: True",
    "03_your_environment": "observation must be int32[], but it is float32[]",
}


def cells(path, kind):
    return [x for x in json.loads(path.read_text())["cells"] if x["cell_type"] == kind]


def code(path):
    return ["".join(cell["source"]) for cell in cells(path, "code")]


def check_claims(name, printed):
    for pattern, least in LEAST[name].items():
        found = re.search(pattern, printed)
        assert found, f"{pattern}: {printed}"
        assert float(found[1]) >= least
    assert SAYS.get(name, "") in printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_one_title_and_sections_below_it(path):
    text = "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    title, *sections = (line for line in text.splitlines() if line.startswith((" ", "#")))
    assert title.startswith("# ")
    assert sections
    assert all(section.startswith("## ") for section in sections)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_of_a_notebook_are_stored(path):
    text, numbers, printed, pictures = path.read_text(), [], "", 0
    for cell in cells(path, "code"):
        numbers.append(cell["execution_count"])
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "display_data")
            assert output.get("name") != "stderr"
            printed += "".join(output.get("text", ()))
            pictures += "image/png" in output.get("data", {})
    assert numbers == list(range(1, len(numbers) + 1))
    assert pictures >= 2
    assert not re.search(r"/(tmp|home|root|work)/", text)
    assert len(text) < 300_000
    check_claims(path.stem, printed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(path, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "cells.py").write_text("\n\n".join(code(path)))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::UserWarning", "cells.py"],
        cwd=tmp_path,
        env={**kept, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_claims(path.stem, done.stdout)
