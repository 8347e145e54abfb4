"""Records of a run: its counters, and a line of the log for each report of the driver."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from typing import Any

import jax
import numpy as np

from podracer.config.experiment import Experiment
from podracer.devices.memory import used_bytes, used_device_bytes
from podracer.drivers.progress import Progress
from podracer.environment import Environment, HostEnvironments, features
from podracer.evaluate import MAX_STEPS, Evaluation
from podracer.run.resume import Best, Totals
from podracer.schedules import current_values, over_run
from podracer.scores.score import whole_return
from podracer.types import Discrete

_LOG = logging.getLogger("podracer")


class Stopwatch:
    """Wall-clock seconds by stage; the remaining time is `time_step`, spent in the driver."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._stages = {"time_compile": 0.0, "time_evaluate": 0.0, "time_save": 0.0}
        self._ended = dict.fromkeys(self._stages, self._mark)

    def add(self, stage: str) -> None:
        """Add the time since the last lap or stage to `stage`."""
        time_now = time.perf_counter()
        self._stages[stage] += time_now - self._mark
        self._mark = self._ended[stage] = time_now

    def since(self, stage: str) -> float:
        """Return the seconds since `stage` last ended, or since the start."""
        return time.perf_counter() - self._ended[stage]

    def since_lap(self) -> float:
        """Return the seconds since the last lap, or since the start."""
        return time.perf_counter() - self._mark + sum(self._stages.values())

    def lap(self, compile_seconds: float = 0.0, end: float | None = None) -> dict[str, float]:
        """Return the seconds of each stage since the last lap, and start a new lap.

        The driver's time ends at `end`, by default now, and leaves out the seconds for which it
        waited for its program.
        """
        # The thread that waited for a chunk may report an end before that of the last lap.
        end = max(time.perf_counter() if end is None else end, self._mark)
        seconds = {"time_step": end - self._mark - compile_seconds, **self._stages}
        self._mark = end
        self._stages = dict.fromkeys(self._stages, 0.0)
        return seconds


class Recorder:
    """Counters of a run, and its records."""

    def __init__(self, experiment: Experiment, env: Environment | HostEnvironments) -> None:
        self.totals = Totals()
        self.numbers: dict[str, Any] = {}  # the newest record, before callbacks add to it
        self.best: Best | None = None
        self._equal: Best | None = None  # the newest evaluation, if it equals the best
        self.chunk_seconds = 0.0  # the driver's for a chunk, by the last record
        self._env, self._keeps_best = env, experiment.keep_best
        self._is_greedy = experiment.evaluation_policy == "greedy"
        # Each pod of a population has its own.
        self._agent = None if experiment.pods else over_run(experiment.agent, experiment.num_steps)
        self._changes: dict[str, float] = {}  # numbers that were changed while the run trained
        self._steps_per_update = experiment.driver.steps_per_update
        self._updates_per_chunk = experiment.run_driver.updates_per_chunk
        self._collected_before = 0  # by the resumed run
        self._num_faults = 0  # environments' faults so far, in this process
        self._earlier: dict[str, Any] = {}  # last numbers in the records of the resumed run
        self._clock, self._cpu = time.perf_counter(), time.process_time()
        # Amounts and seconds of the last records, see `_rate`.
        self._recent_frames: list[tuple[float, float]] = []
        self._recent_cpu: list[tuple[float, float]] = []
        self._warnings = set[str]()  # subjects of which it has warned

    def restore(self, totals: Totals, best: Best | None = None, records: Any = ()) -> None:
        """Continue from these totals and records; steps in flight when the run stopped are lost."""
        dropped = totals.collected - totals.updates * self._steps_per_update
        self.totals = dataclasses.replace(totals, dropped=dropped if totals.collected else 0)
        self._collected_before = totals.collected
        self.best = best if self._keeps_best else None
        for record in records:  # records after the checkpoint do not count
            if (record.get("updates") or 0) <= totals.updates:
                self._earlier |= record

    def change(self, agent: Any, numbers: dict[str, float]) -> None:
        """Record from now on an agent's schedules, and these numbers, which have changed."""
        self._agent, self._changes = agent, numbers

    def record(
        self, progress: Progress, times: Stopwatch, compile_seconds: float = 0.0
    ) -> dict[str, Any]:
        """Return a line of the log; its speed leaves out compiling, evaluating and saving.

        The program took `compile_seconds` to compile. The driver waited for a part of them: the
        initial state was made meanwhile.
        """
        waited = progress.compile_seconds
        lap = times.lap(waited, progress.time)
        compiling = max(waited, compile_seconds) if waited else 0.0
        stepping = lap["time_step"] = max(lap["time_step"], 1e-9)
        num_updates = max(1, progress.updates - self.totals.updates)
        self.chunk_seconds = stepping * self._updates_per_chunk / num_updates
        frames_per_update = progress.frames / num_updates
        self.totals.updates = progress.updates
        self.totals.frames += progress.frames
        lap["time_compile"] += compiling
        self.totals.seconds += sum(lap.values())
        for name in progress.not_finite:  # the run goes on, see `Fault`
            text = f"update {progress.updates}: the metric {name!r} is not finite; its records are "
            self.warn(name, text + "null where it is not, and the run goes on.")
        learned = self.totals.frames - round(frames_per_update)  # before the last update
        schedules = {} if self._agent is None else current_values(self._agent, learned)
        self.numbers = {
            "updates": progress.updates,
            "frames": self.totals.frames,
            "seconds": self.totals.seconds,
            "frames_per_second": _rate(self._recent_frames, progress.frames, stepping),
            **schedules,
            **self._changes,
            **progress.metrics,
            **self._faults(progress.metrics),
            **self._accounts(progress),
            **lap,
            **self._usage(),
        }
        return dict(self.numbers)

    def add_seconds(self, record: dict[str, Any], times: Stopwatch) -> None:
        """Add the seconds since a record was made to it: its evaluation took them."""
        lap = times.lap()
        self.totals.seconds += sum(lap.values())
        record |= {stage: record[stage] + seconds for stage, seconds in lap.items()}
        record["seconds"] = self.totals.seconds
        self.numbers = dict(record)

    def _usage(self) -> dict[str, float]:
        """Return what this process took of its machine since the last record."""
        clock, cpu = time.perf_counter(), time.process_time()
        seconds = max(clock - self._clock, 1e-9)
        cores = _rate(self._recent_cpu, cpu - self._cpu, seconds)
        self._clock, self._cpu = clock, cpu
        on_device = used_device_bytes()
        return {
            "machine_cores": cores,
            "machine_memory": used_bytes(),
            **({} if on_device is None else {"machine_device_memory": on_device}),
        }

    def add_evaluation(
        self, evaluation: Evaluation, record: dict[str, Any], progress: Progress
    ) -> None:
        """Add an evaluation to the record; of a population the means over its sound pods."""
        if self._keeps_best:
            self._compare(evaluation, progress)
        sound: Any = ... if progress.pods is None else ~np.isnan(progress.pods["episodes"])
        record["evaluation_return"] = float(evaluation.returns[sound].mean())
        record["evaluation_length"] = float(evaluation.lengths[sound].mean())
        distinct = evaluation.distinct_episodes[sound]
        record["evaluation_distinct_episodes"] = float(distinct.mean())
        of_all = f"of {evaluation.returns.size} evaluation episodes"
        if unfinished := int(np.sum(evaluation.unfinished[sound])):
            record["evaluation_unfinished"] = unfinished
            text = f"{unfinished} {of_all} did not end within {MAX_STEPS:,} steps: their returns"
            self.warn("unfinished", f"{text} are partial, never the best, and reach no target.")
        self.totals.evaluation_return = whole_return(record)
        if evaluation.broken:
            record["evaluation_broken"] = evaluation.broken
        if progress.pods is not None:
            progress.pods["evaluation_return"] = evaluation.returns.mean(axis=-1)
            progress.pods["evaluation_unfinished"] = evaluation.unfinished
            progress.pods["evaluation_distinct_episodes"] = evaluation.distinct_episodes
        if wrong := int((~np.isfinite(evaluation.returns[sound])).sum()):
            text = f"{wrong} {of_all} had rewards that are not finite"
            self.warn("rewards", f"{text}: this evaluation has no score.")
        if evaluation.repetition:
            ways = ['`evaluation_policy="sampled"`'] * self._is_greedy
            ways += ["`evaluation_epsilon=0.01`"] * isinstance(self._env.spec.action, Discrete)
            text = f"{', '.join(ways)} or " if ways else ""
            text = f"to measure more take {text}fewer `evaluation_episodes`."
            self.warn("repetition", f"{evaluation.repetition}: {text}")

    def warn(self, subject: str, text: str) -> None:
        """Warn once of each subject."""
        if subject not in self._warnings and jax.process_index() == 0:
            self._warnings.add(subject)
            _LOG.warning(text)

    def _compare(self, evaluation: Evaluation, progress: Progress) -> None:
        """Remember an evaluation that exceeds all earlier ones, and one that equals the best.

        Pods with a fault, with episodes that did not end or without a finite mean are left out.
        """
        means = evaluation.returns.mean(axis=-1)
        returns = np.where(np.isfinite(means) & (evaluation.unfinished == 0), means, -np.inf)
        if progress.pods is not None:
            returns = np.where(np.isnan(progress.pods["episodes"]), -np.inf, returns)
        score = float(returns.max())
        highest = self.best.mean_return if self.best else -math.inf
        if math.isfinite(score) and score > highest:
            self.best = Best(progress.updates, score)
        self._equal = Best(progress.updates, score) if score == highest else None

    def best_saved(self) -> Best | None:
        """Return the best evaluation of which there is a checkpoint, once this update is saved.

        Of equal ones it is the newest that is saved for another reason: on a solved task each
        evaluation equals the best.
        """
        if self._equal is not None and self._equal.updates == self.totals.updates:
            self.best = self._equal
        return self.best

    def _faults(self, metrics: dict[str, Any]) -> dict[str, int]:
        """Return faults of environments in the whole run; say new ones if nobody sees records."""
        num_faults = metrics.get("environment_faults", 0)
        if num_faults > self._num_faults and jax.process_index() > 0:
            _LOG.warning(
                "process %d: %d faults of environments so far.", jax.process_index(), num_faults
            )
        self._num_faults = num_faults
        counts = {k: n for k, n in metrics.items() if k.startswith("environment_faults")}
        return {k: n + self._earlier.get(k, 0) for k, n in counts.items()}

    def _accounts(self, progress: Progress) -> dict[str, int]:
        """Return the numbers of steps of this host's actors: collected, trained on and dropped."""
        if progress.collected is None:
            return {}
        totals, count = self.totals, jax.process_count()
        totals.collected = self._collected_before + progress.collected * count
        steps = (totals.collected, progress.updates * self._steps_per_update, totals.dropped)
        collected, learned, dropped = (total // count for total in steps)
        accounts = {
            "steps_collected": collected,
            "steps_learned": learned,
            "steps_in_flight": collected - learned - dropped,
            "steps_dropped": dropped,
        }
        if frame_skip := features(self._env).frame_skip:
            accounts["emulator_frames"] = totals.frames * frame_skip
        return accounts


def _rate(recent: list[tuple[float, float]], amount: float, seconds: float) -> float:
    """Add a record to the recent ones; return the amount per second over the last 0.1 s of them.

    The end of a short chunk may be noticed late, and the end of the next one right after it.
    """
    recent.append((amount, seconds))
    while sum(seconds for _, seconds in recent[1:]) >= 0.1:
        del recent[0]
    return sum(amount for amount, _ in recent) / sum(seconds for _, seconds in recent)
