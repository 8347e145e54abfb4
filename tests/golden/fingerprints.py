"""Fingerprints of short runs: shows that a change is neutral, or what it changed.

    python tests/golden/fingerprints.py                     compare with the recorded fingerprints
    python tests/golden/fingerprints.py --against COMMIT    compare with another commit, run now
    python tests/golden/fingerprints.py --record            record what this commit computes
    python tests/golden/fingerprints.py --only ppo lpg      runs whose names contain one of these

Every agent that has a recipe is trained for a few updates, under each architecture that can run
it, and so are a sweep, a tournament, LPG and a student under a learned rule. A fingerprint is the
SHA-256 of the sorted digests of all arrays (dtype, shape and bytes) of the learner's state, so
renaming or reordering the fields of a state leaves it as it was. Bits depend on the version of JAX,
on the model of the processor and on its vectors, so a record is kept for each combination.
A commit that changes bits on purpose is recorded on one machine: where another's record differs,
see first whether the commit that made it still computes it there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).resolve().parents[2]
DEVICES = 4

# Recipe and number of updates; with a replay enough of them to learn from it.
ANAKIN = {
    "catch": 20,
    "catch_a2c": 20,
    "catch_impala": 20,
    "catch_stacx": 6,
    "catch_frodo": 6,
    "catch_muzero": 10,
    "catch_alphazero": 6,
    "cartpole_ppo": 10,
    "cartpole_dqn": 40,
    "cartpole_rainbow": 40,
    "cartpole_pqn": 6,
    "memory_pqn": 4,
    "memory_ppo": 4,
    "memory_r2d2": 12,
    "pendulum_ppo": 4,
    "pendulum_ddpg": 40,
    "pendulum_td3": 40,
    "pendulum_sac": 40,
    "pendulum_qt_opt": 40,
    "pendulum_recurrent_sac": 12,
    "pendulum_recurrent_td3": 12,
    "pendulum_muzero": 10,
    "breakout_cnn_ppo": 2,
    "trading_ppo": 4,
    "worlds_a2c": 10,
    "lpg": 4,
}
LOCK_STEP = (
    "catch_a2c", "catch_impala", "catch_stacx", "catch_muzero", "catch_alphazero", "cartpole_ppo",
    "cartpole_dqn", "cartpole_pqn", "cartpole_rainbow", "memory_r2d2", "pendulum_ddpg",
    "pendulum_sac", "pendulum_muzero", "pendulum_qt_opt", "pendulum_recurrent_sac",
)  # fmt: skip
SEBULBA = {"atari_impala": 2, "cartpole_sebulba": 6}


def runs(directory: Path) -> dict[str, Callable[[], str]]:
    """Name -> function that trains and returns the fingerprint."""
    table: dict[str, Callable[[], str]] = {}
    for name, updates in ANAKIN.items():
        table[f"anakin {name}"] = lambda n=name, u=updates: trained(short(n, u))
    for name in LOCK_STEP:
        table[f"lock-step {name}"] = lambda n=name: trained(lock_step(short(n, ANAKIN[n])))
    for name, updates in SEBULBA.items():
        table[f"sebulba {name}"] = lambda n=name, u=updates: trained(short(n, u))
    table["anakin catch_a2c, 4 devices"] = lambda: trained(short("catch_a2c", 20), devices=4)
    table["anakin cartpole_ppo, 4 devices"] = lambda: trained(short("cartpole_ppo", 10), devices=4)
    table["anakin memory_r2d2, 4 devices"] = lambda: trained(short("memory_r2d2", 12), devices=4)
    table["sebulba catch_impala, 3 devices"] = lambda: trained(
        short("catch_impala", 20).with_arch("sebulba"), devices=3
    )
    table["rule catch_a2c"] = lambda: under_a_learned_rule(directory)
    table["sweep catch_a2c"] = lambda: sweep(directory / "sweep")
    table["tournament cartpole_ppo"] = lambda: tournament(directory / "tournament")
    return table


# --- runs ----------------------------------------------------------------------------------------


def short(recipe: str, updates: int) -> Any:
    """The recipe cut to a few updates in two chunks, on one device, evaluated once."""
    from podracer import recipes
    from podracer.schedules import over_run

    experiment = recipes.find(recipe)
    agent, driver = over_run(experiment.agent, experiment.num_steps), experiment.driver
    replay = getattr(agent, "replay", None)
    if replay is not None:
        replay = dataclasses.replace(
            replay,
            capacity=20_000,
            warmup=min(replay.warmup, 20 * driver.num_envs),
            updates_per_rollout=2,
        )
        agent = dataclasses.replace(agent, replay=replay)
    driver = dataclasses.replace(driver, updates_per_chunk=updates // 2)
    return dataclasses.replace(
        experiment,
        agent=agent,
        driver=driver,
        frames=updates * driver.steps_per_update,
        evaluations=min(1, experiment.evaluations),
        evaluation_episodes=2,
        target_return=None,
    )


def lock_step(experiment: Any) -> Any:
    experiment = experiment.with_arch("sebulba")
    driver = dataclasses.replace(experiment.driver, policy_lag=0, threads_per_actor=1)
    return dataclasses.replace(experiment, driver=driver)


def trained(experiment: Any, devices: int = 1, **options: Any) -> str:
    import podracer

    experiment = dataclasses.replace(experiment, devices=devices)
    with tempfile.TemporaryDirectory() as directory:
        result = podracer.train(experiment, run_dir=Path(directory) / "run", **options)
    returns = () if result.evaluation is None else result.evaluation.returns
    return digest((result.state, returns))


def under_a_learned_rule(directory: Path) -> str:
    """A network updated by the rule that a short run of LPG learned."""
    import podracer
    from podracer import recipes

    run, rule = directory / "lpg", directory / "rule.npz"
    podracer.train(dataclasses.replace(short("lpg", 2), devices=1), run_dir=run)
    command(["rule", str(run), "--out", str(rule)])
    return trained(recipes.with_update_rule(short("catch_a2c", 10), str(rule)))


def sweep(directory: Path) -> str:
    import podracer

    frames = 10 * 128 * 16
    command([
        "sweep", "catch_a2c", "--vary", "learning_rate=1e-3,2e-3", "--seeds", "2", "--frames",
        str(frames), "--evaluations", "1", "--devices", "2", "--run-dir", str(directory),
    ])  # fmt: skip
    return digest([podracer.load(directory, pod=pod)[1] for pod in range(4)])


def tournament(directory: Path) -> str:
    """Two pods that do not depend on each other, two rounds each."""
    import podracer

    command([
        "tournament", "cartpole_ppo", "--selection", "Independent", "--pods", "2", "--rounds", "2",
        "--round-frames", "20480", "--episodes", "4", "--run-dir", str(directory),
    ])  # fmt: skip
    checkpoints = sorted(directory.rglob("checkpoints"))
    return digest([podracer.load(path.parent)[1] for path in checkpoints])


def command(arguments: Sequence[str]) -> None:
    """A command of the command line, in a process of its own."""
    code = "import sys; from podracer.cli.main import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"podracer {' '.join(arguments)}: {done.stdout}{done.stderr}")


# --- fingerprints --------------------------------------------------------------------------------


def digest(tree: Any) -> str:
    """SHA-256 of the sorted digests of all leaves: names and order of fields do not count."""
    import jax
    import numpy as np

    def one(leaf: Any) -> str:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        head = f"{array.dtype}{array.shape}".encode()
        return hashlib.sha256(head + array.tobytes()).hexdigest()

    return hashlib.sha256("".join(sorted(map(one, jax.tree.leaves(tree)))).encode()).hexdigest()


def computed(only: Sequence[str]) -> dict[str, str]:
    """The fingerprints of this commit; each is said on stderr when it is there."""
    prepare()
    from podracer.io.entry_points import installed, package_of

    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, run in runs(Path(directory)).items():
            if only and not any(part in name for part in only):
                continue
            recipe = name.split()[1].rstrip(",")
            if (hint := package_of(recipe)) and recipe not in installed("recipes"):
                print(f"{'-':>6}    {'skipped':16}  {name}: {hint}", file=sys.stderr)
                continue
            start = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                results[name] = run()
            seconds = time.perf_counter() - start
            print(f"{seconds:6.1f} s  {results[name][:16]}  {name}", file=sys.stderr, flush=True)
    return results


def prepare() -> None:
    """Four virtual CPU devices, and a compile cache of its own."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cache = Path(tempfile.gettempdir()) / f"podracer-golden-cache-{os.getuid()}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)


def machine() -> str:
    """What bits depend on: the version of JAX, the processor's model and its widest vectors."""
    import jax

    about: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        about = {name.strip(): text.strip() for name, _, text in (x.partition(":") for x in lines)}
    kind = about.get("model name") or platform.processor() or platform.machine()
    model = [f"{name} {about[name]}" for name in ("cpu family", "model") if name in about]
    flags = about.get("flags", "").split()
    vectors = [name for name in ("avx512f", "avx2", "avx") if name in flags][:1]
    return ", ".join([f"jax {jax.__version__}", platform.machine(), kind, *model, *vectors])


def computed_at(commit: str, only: Sequence[str]) -> dict[str, str]:
    """The fingerprints of another commit, by its own copy of this file."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            script = tree / Path(__file__).resolve().relative_to(ROOT)
            arguments = [sys.executable, str(script), "--json"]
            arguments += ["--only", *only] if only else []
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            done = subprocess.run(
                arguments, cwd=tree, env=environment, stdout=subprocess.PIPE, check=True
            )
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    return json.loads(done.stdout)


def table(before: dict[str, str], after: dict[str, str]) -> tuple[str, bool]:
    """A line a run, and whether all of `after` equal `before`."""
    lines, equal = [], True
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, "-"), after.get(name, "-")
        equal &= old == new
        word = "equal" if old == new else "DIFFERENT"
        lines.append(f"{name:36} {old[:16]:16} {new[:16]:16} {word}")
    return "\n".join(lines), equal


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", help="run this commit, too, and compare")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}")
    parser.add_argument("--json", action="store_true", help="print the fingerprints as JSON")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts of names")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)
    after = computed(arguments.only)
    if arguments.json:
        print(json.dumps(after, indent=1))
        return 0
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    if arguments.record:
        records[machine()] = {**records.get(machine(), {}), **after}
        RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
        return 0
    if arguments.against:
        before = computed_at(arguments.against, arguments.only)
    elif machine() in records:
        before = {n: f for n, f in records[machine()].items() if not arguments.only or n in after}
    else:
        print(f"Nothing is recorded for {machine()}: compare with --against COMMIT.")
        return 2
    lines, equal = table(before, after)
    print(lines)
    print(f"{len(after)} runs on {machine()}: {'all equal' if equal else 'not all equal'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
