"""Learner: updates from the actors' rollouts, in the caller's thread, and reports on them."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int64

from podracer.agent import Blueprint
from podracer.devices.mesh import Arrival, note_program, on_one_device
from podracer.drivers.progress import Progress, Request, request_array
from podracer.drivers.sebulba.actor import STAGES, Rollout
from podracer.drivers.sebulba.actor_pool import ActorPool
from podracer.drivers.sebulba.config import DeviceSplit
from podracer.drivers.sebulba.supervisor import StageTimer
from podracer.drivers.sebulba.update import UpdateProgram, on_mesh
from podracer.drivers.state import TrainState, with_blueprint
from podracer.environment import log_first_faults
from podracer.errors import EnvironmentFault

# Steps of each environment, none of them valid, after which a run ends: in reports in a row that
# all have new faults; and in any reports, for an episode broken by a fault that never ends.
EMPTY_STEPS, EMPTY_EPISODE = 10, 100_000


class Learner:
    """Learner devices of all hosts, as this host sees them."""

    def __init__(
        self,
        split: DeviceSplit,
        actors: ActorPool,
        program: UpdateProgram,
        request: Callable[[], int],
        report: Callable[[int, Any], Progress],
    ) -> None:
        """`report(updates, values)`: Return the report on metrics, or raise an update's fault."""
        self._split, self._actors, self._update = split, actors, program
        self._request, self._report = request, report
        self._multi_host = jax.process_count() > 1
        self._no_request = request_array(split.mesh, Request.NONE)
        self._version = actors.first_update  # number of updates dispatched
        self._timer = StageTimer("collect", "learn", "report")
        # Updates that may still run: when each was given to the devices, and its metrics.
        self._pending: list[tuple[float, Arrival]] = []
        self._ended = time.perf_counter()  # when the devices had ended the last fetched update
        self._idle = 0.0  # seconds since the last report in which they had no update
        self._fetched: list[Any] = []  # metrics since the last report
        # Since the last report, of each trajectory: updates that the parameters of its steps were
        # behind, `[T]`, and seconds in each stage of its actor.
        self._stats: list[tuple[Int64[np.ndarray, " T"], dict[str, float]]] = []
        self._faults: dict[str, dict[str, int]] = {}  # faults of each actor by kind, in all
        self._first_faults: dict[str, str] = {}  # a line on the first of each kind
        self._logged = set[str]()  # kinds of them
        self._empty_steps = 0  # steps of each environment since the last valid one
        self._faulty_steps = 0  # among them, in the latest reports, which all had new faults
        self._reported_faults = 0
        self._agreed_request: int = Request.NONE  # the largest of all hosts

    def request(self) -> int:
        """Return the request of this host, or the largest that several hosts have agreed on."""
        return self._agreed_request if self._multi_host else self._request()

    def may_end(self) -> bool:
        """Return whether a report need not wait for another update, as its end was asked for."""
        return bool(self._stats) and not self._multi_host and self.request() == Request.UPDATE_END

    def update(self, state: TrainState, rollouts: list[Rollout]) -> TrainState:
        """Learn from a rollout of every actor, and send them the new parameters."""
        self._timer.start("learn")
        mesh, multi_host = self._split.mesh, self._multi_host
        request = request_array(mesh, self._request()) if multi_host else self._no_request
        shards = [on_mesh(mesh, rollout.shards) for rollout in rollouts]
        dispatched = time.perf_counter()
        state, params, metrics = self._update(state, shards, request)
        note_program(metrics["fault"])
        self._pending.append((dispatched, Arrival(metrics)))
        self._stats += [(self._version - x.versions, x.seconds) for x in rollouts]
        self._faults.update({rollout.actor: rollout.faults for rollout in rollouts})
        for rollout in rollouts:
            self._first_faults = {**rollout.first_faults, **self._first_faults}
        log_first_faults("in training", self._first_faults, self._logged)
        self._version += 1
        self._actors.publish(on_one_device(params), self._version)
        if len(self._pending) > 1:
            self._fetch_metrics()
        self._timer.start("collect")
        return state

    def change(self, blueprint: Blueprint) -> None:
        """Go on with a blueprint that differs in its numbers alone."""
        self._update = with_blueprint(self._update, blueprint, self._split.mesh)

    def _fetch_metrics(self) -> None:
        """Wait for the oldest update. Raises its fault."""
        dispatched, arrival = self._pending.pop(0)
        values = arrival.values()
        self._idle += max(0.0, dispatched - self._ended)
        self._ended = arrival.time
        self._agreed_request = self._report(self._version - len(self._pending), values).request
        self._fetched.append(values)

    def progress(self, updates: int) -> Progress:
        """Wait for all updates and return the report on those since the last report.

        Raises `EnvironmentFault` where faults of environments left no valid step.
        """
        self._timer.start("learn")
        while self._pending:
            self._fetch_metrics()
        self._timer.start("report")
        progress = self._report(updates, _total(self._fetched))
        num_threads = self._split.threads
        faults = Counter[str]()
        for counts in self._faults.values():
            faults.update(counts)
        self._check_valid_steps(progress, faults)
        metrics = {
            **progress.metrics,
            **_utilization_metrics(self._stats, self._timer.collect(), self._idle, num_threads),
            "queue_occupancy": self._actors.queue_occupancy(),
            "environment_faults": faults.total(),
            **{f"environment_faults_{kind}": count for kind, count in faults.items() if count},
        }
        self._fetched, self._stats, self._idle = [], [], 0.0
        collected = self._actors.collected_steps
        return dataclasses.replace(progress, metrics=metrics, collected=collected)

    def _check_valid_steps(self, progress: Progress, faults: Counter[str]) -> None:
        """Raise `EnvironmentFault` where faults of environments leave no valid step.

        A fault masks the rest of an episode, which may be longer than many reports, and a second
        one may fall into it. An environment that is broken has new faults in report after report.
        """
        has_new_faults = faults.total() > self._reported_faults
        self._reported_faults = faults.total()
        num_steps = sum(len(lags) for lags, _ in self._stats) // self._split.threads
        had_new_faults = self._faulty_steps > 0
        self._empty_steps = 0 if progress.frames else self._empty_steps + num_steps
        if progress.frames or not has_new_faults:
            self._faulty_steps = 0
        else:
            self._faulty_steps += num_steps
        never_ends = faults.total() and self._empty_steps >= EMPTY_EPISODE
        if (had_new_faults and self._faulty_steps >= EMPTY_STEPS) or never_ends:
            descriptions = [f"`{kind}`, {text}" for kind, text in self._first_faults.items()]
            raise EnvironmentFault(
                f"update {progress.updates}: not one of the last {self._empty_steps} steps of each "
                f"environment was valid, after {faults.total()} faults. The first of each kind: "
                f"{'; '.join(descriptions) or 'not known'}."
            )

    def after_report(self) -> None:
        """Continue after a report: the time until now counts as reporting.

        Requests of before are answered; a host that still has one repeats it.
        """
        self._agreed_request = Request.NONE
        self._timer.start("collect")
        self._ended = time.perf_counter()


def _utilization_metrics(
    stats: list[tuple[Int64[np.ndarray, " T"], dict[str, float]]],
    learner_seconds: dict[str, float],
    learner_idle: float,
    num_threads: int,
) -> dict[str, float | None]:
    """Return policy lag, shares of idle time, and seconds in each stage (mean over the actors).

    An actor is idle while it waits for parameters or for room in its queue, the learner while its
    devices have no update. Its thread also collects trajectories while they compute.
    """
    lags = np.stack([lags for lags, _ in stats])
    actor_seconds = {
        stage: sum(seconds[stage] for _, seconds in stats) / num_threads for stage in STAGES
    }
    actor_idle = actor_seconds["parameters"] + actor_seconds["queue"]
    learner_total = learner_seconds["collect"] + learner_seconds["learn"]
    learner_idle = min(learner_idle, learner_total)
    learner_seconds |= {"collect": learner_idle, "learn": learner_total - learner_idle}
    return {
        "lag_mean": float(lags.mean()),
        "lag_max": int(lags.max()),
        "actor_idle": actor_idle / max(sum(actor_seconds.values()), 1e-9),
        "learner_idle": learner_idle / max(learner_total, 1e-9),
        **{f"actor_time_{stage}": seconds for stage, seconds in actor_seconds.items()},
        **{f"learner_time_{stage}": seconds for stage, seconds in learner_seconds.items()},
    }


def _total(values: list[Any]) -> Any:
    """Return the metrics of several updates in the form of one: sums and means."""
    sums = ("frames", "episodes", "episode_return", "episode_length")
    return {
        **values[-1],
        **{name: sum(value[name].item() for value in values) for name in sums},
        "mean": jax.tree.map(lambda *x: np.mean(x, axis=0), *(value["mean"] for value in values)),
    }
