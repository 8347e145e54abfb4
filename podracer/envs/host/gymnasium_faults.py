"""What a batch of Gymnasium environments knows of its rows: faults, and who holds up the others."""

from __future__ import annotations

import logging

import jax
import numpy as np

from podracer.envs.host.gymnasium_protocol import (
    BAD_DATA_FAULTS,
    FAULT_KINDS,
    MAX_CONSECUTIVE_FAILURES,
    SharedMemory,
    WorkerSetup,
)
from podracer.types import TimeStep

_LOG = logging.getLogger("podracer")
_COMPARED_STEPS = 200  # after which the speeds of a batch's environments are compared
_STRAGGLER_FACTOR = 5.0  # times slower than the median of the batch
_STRAGGLER_SECONDS = 1e-3  # a faster step holds nobody back


def timestep_of(setup: WorkerSetup, shared: SharedMemory) -> TimeStep:
    """Return the timestep of a batch, whose arrays are views of the memory."""
    observation = jax.tree.map(lambda leaf: shared.observation[leaf.name], setup.observation)
    fields = (shared.reward, shared.discount, shared.first, shared.last)
    return TimeStep(observation, *fields)  # type: ignore[arg-type]


class FaultLog:
    """Faults of a batch, counted by kind, each kind with a line on its first."""

    def __init__(
        self, name: str, setup: WorkerSetup, shared: SharedMemory, max_restarts: int
    ) -> None:
        self._name, self._setup, self._shared = name, setup, shared
        self._max_restarts = max_restarts
        self.faults, self.first_faults = dict.fromkeys(FAULT_KINDS, 0), dict[str, str]()
        self._num_steps, self._named_rows = 0, set[int]()

    def check(self) -> str | None:
        """Update the counts; return why the batch cannot go on where there are too many."""
        shared = self._shared
        counts = shared.fault_counts.sum(axis=0).tolist()
        self.faults.update(zip(FAULT_KINDS, counts, strict=True))
        shared.describe_first_faults(self.first_faults)
        row = int(shared.consecutive_failures.argmax())
        limit = MAX_CONSECUTIVE_FAILURES
        if shared.consecutive_failures[row] >= limit:
            reason = f"restarted {limit} times without one good step between, the last time"
        elif sum(counts) > self._max_restarts:
            row = int(shared.fault_time.argmax())
            reason = (
                f"restarted beyond the {self._max_restarts} that all rows may need together "
                "(`max_restarts`),"
            )
        else:
            return None
        ends = [end for _, end in self._setup.row_ranges]
        worker = next(number for number, end in enumerate(ends) if row < end)
        kind = FAULT_KINDS[shared.fault_kind[row]]
        remedy = (
            "\nMore restarts or slower steps are allowed by options after the environment's name: "
            f",max_restarts={10 * self._max_restarts + 10} or "
            f",step_seconds={6 * self._setup.step_seconds:g}"
        )
        return (
            f"row {row} of worker {worker} (environment {shared.env_index[row]} of the run) was "
            f"{reason} because of the fault `{kind}`.\n{shared.describe_fault(row)}"
            f"{'' if kind in BAD_DATA_FAULTS else remedy}"
        )

    def count_step(self) -> None:
        """Count a step of the batch, and log an environment that is much slower than others, once.

        Speeds are compared after many steps.
        """
        self._num_steps += 1
        if self._num_steps % _COMPARED_STEPS:
            return
        seconds = self._shared.step_seconds / _COMPARED_STEPS
        row, usual = int(seconds.argmax()), float(np.median(seconds))
        is_slow = seconds[row] > max(_STRAGGLER_FACTOR * usual, _STRAGGLER_SECONDS)
        if is_slow and row not in self._named_rows:
            self._named_rows.add(row)
            _LOG.warning(
                "%s: environment %d of the run is %.0f times slower than the others, %.3g s for a "
                "step, and all of its batch wait for it.",
                self._name,
                self._shared.env_index[row],
                seconds[row] / usual,
                seconds[row],
            )
        self._shared.step_seconds[:] = 0
