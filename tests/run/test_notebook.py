"""A notebook: its interrupts, its variables, and the panel that is updated in place."""

import asyncio
import os
import re
import sys

import nbclient
import nbformat
import pytest
from child import environment, records
from gate import GENEROUS

SETUP = """
import pathlib, threading, podracer
from gate import Gate

gate, kept = Gate(), "a variable of the user"
gate.is_open.set()
DRIVER = {"num_envs": 4, "rollout_length": 2, "updates_per_chunk": 2}

def train(run, frames, callback=lambda boundary: None, **options):
    return podracer.train(
        "catch_a2c", environment=gate, driver=DRIVER, frames=frames, evaluations=0,
        save_seconds=0, devices=2, run_dir=run, callbacks=[callback], **options,
    )

def report():
    gate.waits.wait()
    pathlib.Path("waits").touch()
"""
ONCE = """
for seed in range(2):
    print("seed", seed)
    train(f"seed-{seed}", 10**9, lambda boundary: print("chunk"))
"""
TWICE = """
threading.Thread(target=report).start()
train("stuck", 10**9, lambda boundary: gate.is_open.clear())
"""
AFTERWARDS = """
print(kept)
gate.is_open.set()
print(train("stuck", 2 * 16, resume=True, progress=False).reason)
"""
STOPPING = "Stopping at the end of this chunk and saving; interrupt again to stop at once."


def text_of(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def error_of(cell):
    return next(output for output in cell.outputs if output.output_type == "error")


async def execute(folder, cells):
    """Execute cells, each with the moments at which it is interrupted, functions of the cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(x) for x, *_ in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=int(GENEROUS), kernel_name="python3", allow_errors=True
    )
    path = os.pathsep.join(sys.path)
    env = environment(PYTHONPATH=path, JAX_NUM_CPU_DEVICES="2")
    async with client.async_setup_kernel(cwd=str(folder), env=env):
        for number, (cell, (_, *moments)) in enumerate(zip(notebook.cells, cells, strict=True)):
            execution = asyncio.ensure_future(client.async_execute_cell(cell, number))
            for moment in moments:
                while not moment(cell) and not execution.done():
                    await asyncio.sleep(0.02)
                await client.km.interrupt_kernel()
            await execution
    return notebook.cells


@pytest.mark.figure(4)
@pytest.mark.slow
def test_a_notebook_is_interrupted_and_keeps_its_variables(tmp_path):
    def trains(cell):
        return "chunk" in text_of(cell)

    def waits(_):
        return (tmp_path / "waits").exists()

    def has_answered(cell):
        return STOPPING in text_of(cell)

    cells = [(SETUP,), (ONCE, trains), (TWICE, waits, has_answered), (AFTERWARDS,)]
    _, once, twice, afterwards = asyncio.run(execute(tmp_path, cells))
    assert "seed 1" not in text_of(once)
    assert STOPPING in text_of(once)
    assert (error_of(once).ename, error_of(twice).ename) == 2 * ("KeyboardInterrupt",)
    assert error_of(once).evalue.startswith("Saved in")
    assert error_of(twice).evalue.startswith("Stopped at once")
    assert text_of(afterwards).splitlines() == ["a variable of the user", "frames"]
    [panel] = [output.data for output in once.outputs if output.output_type == "display_data"]
    assert "seed-0" in panel["text/html"]
    words = re.sub(r"\x1b\[[\d;]*m", "", panel["text/plain"]).split()
    assert f"{records(tmp_path / 'seed-0')[-1]['updates']:,}" in words, panel["text/plain"]
    assert not [x for x in afterwards.outputs if x.output_type == "display_data"]
