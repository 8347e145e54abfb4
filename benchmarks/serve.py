"""`podracer serve` under load: requests a second, latency, and models that are replaced meanwhile.

    python benchmarks/serve.py                 one client and eight, single observations, batches
    python benchmarks/serve.py --replace 200   promotions, rollbacks and kills under load

A client is a thread of this process with a connection that it keeps, and it has the other core of a
machine of two. Every answer is compared with that of the model that it names; one that differs, or
is lost without an error, ends the program with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import Quick, append

import podracer
from podracer import recipes
from podracer_trading import delivery


@contextlib.contextmanager
def server(directory: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server of a directory; yields the process and its port."""
    command = [sys.executable, "-m", "podracer", "serve", str(directory), "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline().split("/act")[0].rpartition(":")[2])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@dataclasses.dataclass
class Client:
    """A connection that asks the same question again and again."""

    port: int
    body: bytes
    seconds: list[float] = dataclasses.field(default_factory=list)
    answers: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def ask_until(self, end: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while time.monotonic() < end:
            begin = time.perf_counter()
            connection.request("POST", "/act", self.body)
            reply = connection.getresponse()
            answer = json.load(reply)
            self.seconds.append(time.perf_counter() - begin)
            assert reply.status == 200, answer
            self.answers.append(answer)


def measure(run: Path, rows: int, num_clients: int, seconds: float) -> dict[str, Any]:
    """Return the rate and the latency of a number of clients, each with batches of some rows."""
    spec = podracer.load_policy(run).spec
    observation = np.random.default_rng(0).normal(size=(rows, *spec.observation.shape))
    values = observation[0] if rows == 1 else observation
    body = json.dumps({"observation": values.astype(np.float32).tolist()}).encode()
    with server(run) as (_, port):
        Client(port, body).ask_until(time.monotonic() + 0.2)  # which compiles the size
        clients = [Client(port, body) for _ in range(num_clients)]
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=client.ask_until, args=(end,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    latencies = np.concatenate([client.seconds for client in clients])
    p50, p99 = np.quantile(latencies, (0.5, 0.99)) * 1e3
    return {
        "rows": rows,
        "clients": num_clients,
        "requests_per_second": len(latencies) / seconds,
        "actions_per_second": rows * len(latencies) / seconds,
        "milliseconds_p50": p50,
        "milliseconds_p99": p99,
    }


def replace(root: Path, times: int) -> dict[str, Any]:
    """Promote, roll back and kill under load; count the answers and those that are wrong."""
    experiment = recipes.find("trading_ppo").with_fields({
        "environment": "trading:synthetic,tickers=2,bars=200",
        "driver": {"num_envs": 8, "rollout_length": 16, "updates_per_chunk": 2},
        "agent": {"num_epochs": 1, "num_minibatches": 1},
        "frames": 256, "evaluations": 0, "devices": 1,
    })  # fmt: skip
    runs = [podracer.train(experiment, seed=s, run_dir=root / f"s{s}").run_dir for s in (0, 1)]
    scores = itertools.count(0, -1)  # the new run is simulated before the current model
    delivery.validation_return = lambda *args: float(next(scores))
    models, dice = root / "models", random.Random(0)
    policies = [podracer.load_policy(run) for run in runs]
    observation = np.random.default_rng(0).normal(size=policies[0].spec.observation.shape)
    observation = observation.astype(np.float32)
    expected = [policy(observation) for policy in policies]
    body = json.dumps({"observation": observation.tolist()}).encode()
    of_model = {delivery.promote(models, run).model: i for i, run in enumerate(runs)}
    counts = dict.fromkeys(("answers", "wrong", "promotions", "rollbacks", "kills", "refused"), 0)

    while counts["promotions"] + counts["rollbacks"] + counts["kills"] < times:
        with server(models) as (process, port):
            stop, taken = threading.Event(), []

            def ask(port: int = port, stop: Any = stop, taken: Any = taken) -> None:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                while not stop.is_set():
                    try:
                        connection.request("POST", "/act", body)
                        reply = connection.getresponse()
                        answer = json.load(reply)
                    except (OSError, http.client.HTTPException, ValueError):
                        taken.append(None)  # no answer, and the client knows it
                        return
                    taken.append(answer if reply.status == 200 else {"error": answer})

            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread in threads:
                thread.start()
            for _ in range(dice.randint(5, 15)):
                time.sleep(dice.uniform(0.1, 1.0))
                if dice.random() < 0.5 and len(of_model) > 2:
                    with contextlib.suppress(podracer.ConfigError):
                        delivery.rollback(models)
                        counts["rollbacks"] += 1
                else:
                    i = dice.randrange(2)
                    of_model[delivery.promote(models, runs[i]).model] = i
                    counts["promotions"] += 1
            if dice.random() < 0.7:
                process.kill()
                counts["kills"] += 1
                time.sleep(0.2)
            stop.set()
            for thread in threads:
                thread.join()
        for answer in taken:
            if answer is None:
                counts["refused"] += 1
                continue
            counts["answers"] += 1
            right = "model" in answer and np.allclose(
                answer["action"], expected[of_model[answer["model"]]], atol=1e-5
            )
            counts["wrong"] += not right
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replace", type=int, default=0, help="promotions, rollbacks and kills")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="append the results as JSON lines")
    parser.add_argument("--quick", action=Quick, const={"seconds": 0.2})
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.replace:
            counts = replace(root, 3 if options.quick else options.replace)
            print(", ".join(f"{value} {name}" for name, value in counts.items()))
            append(options.out, {"serve": "replace", **counts})
            sys.exit(counts["wrong"] > 0)
        podracer.train("cartpole_ppo", frames=10_240, evaluations=0, run_dir=root / "run")
        for rows, clients in ((1, 1), (1, 8), (64, 1), (1024, 1)):
            row = measure(root / "run", rows, clients, options.seconds)
            append(options.out, {"serve": "load", **row})
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
