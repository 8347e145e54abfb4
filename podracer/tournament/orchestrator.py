"""The orchestrator: one loop that starts rounds and accepts reports, and never waits for a pod.

    selection.choose --Started--> engine --report.json--> leaderboard --view--> selection.choose

Its whole state is in the leaderboard's log, so it may be killed at any moment and goes on again.
Roles of ElegantRL-Podracer (2021, section 3): the pods are the training pool, `pod.score` is the
evaluator, `_take_in` the updater, the selection rule the generator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podracer import recipes as recipes_by_name
from podracer.arguments import typed
from podracer.config.experiment import Experiment
from podracer.config.serialization import to_json
from podracer.drivers.population import hyperparameters, with_hyperparameters
from podracer.errors import ConfigError, PodracerError
from podracer.io.attachments import MakeAttachment, find_attachments
from podracer.io.directories import holds_begun_tournament
from podracer.io.exits import PREEMPTED, preemptions
from podracer.io.paths import user_path
from podracer.io.signals import StopSignals
from podracer.io.steps import saved_updates
from podracer.tournament import config, events, selection
from podracer.tournament.engine import Engine, EngineLost, RoundStopped, find_engine
from podracer.tournament.leaderboard import Leaderboard
from podracer.tournament.pod import Reference, Task, write_task
from podracer.tournament.report import read_report, reason_of_failure

PAUSE_SECONDS = 0.05  # between two polls of the pods
LOOK_SECONDS = 1.0  # between two looks at files and clocks
GRACE_SECONDS = 60.0  # for a pod to save when it is asked to stop
BACK_OFF_SECONDS = 60.0  # at most, before a pod that a machine lost starts again
LOSSES = 20  # one pod's, in a row without progress, after which the engine counts as lost
# Exit codes for which a pod has no fault: the disk, a signal to its machine, a lost machine.
MACHINE_CODES = (73, PREEMPTED, EngineLost.exit_code, *(-number for number in preemptions()))
# Fields of `Started` that an attempt has from the one before at its round.
DECISION = ("parents", "hyperparameters", "experiment")

_LOG = logging.getLogger("podracer")

Watch = Callable[[events.TournamentState], None]


@dataclasses.dataclass
class Attempt:
    """An attempt that runs, and when it last gave a sign of life.

    By the monotonic clock of this process: that of the machine which writes the files may differ,
    and the wall clock may be set, or go on while the machine sleeps.
    """

    pod: int
    directory: Path
    beat: float  # when it started, or was first seen to have recorded
    changes: list[int] = dataclasses.field(default_factory=list)  # times of its files
    is_stalled: bool = False  # it was killed, as it recorded nothing

    def has_recorded(self) -> bool:
        """Return whether the files that grow in a round have changed since the last look."""
        changes, self.changes = self.changes, []
        for name in ("metrics.jsonl", "log.txt"):
            with contextlib.suppress(OSError):
                self.changes.append(os.stat(f"{self.directory}/{name}").st_mtime_ns)
        return changes != self.changes


@dataclasses.dataclass(frozen=True)
class TournamentInfo:
    """Facts about a tournament for attachments."""

    directory: Path
    # `Leaderboard.snapshot`, once the attachment is entered.
    snapshot: Callable[[], tuple[events.TournamentState, int]]


@typed
def run_tournament(
    tournament: config.Tournament,
    directory: str | Path,
    recipes: Sequence[str] = (),
    watch: Watch = lambda state: None,
    attach: Sequence[MakeAttachment | str] = (),
) -> int:
    """Run a new tournament in `directory`, or continue the one there, to its end.

    Pods are processes, which import `recipes`: the names, `MODULE:FUNCTION`, of the experiments
    that have an agent, a network or an environment of your own. With the engine `inline` none are
    needed. `watch` is called with the state whenever it changes. To `attach` what follows the log,
    such as `"mirror:s3://bucket/tournament"`, see `train`; functions get the `TournamentInfo`.

    Returns 0 once every pod has done all its rounds. Ctrl-C and SIGTERM stop it, after the pods had
    a minute to save, with `KeyboardInterrupt` and `SystemExit`, see `train`; the command line gets
    130 and 75. Raises `ConfigError` before anything is started, `PodracerError` at the end if pods
    were quarantined, `EngineLost` when the engine's cluster or helper process is gone.
    """
    tournament.check()
    user_experiments = tuple(recipes_by_name.find(name) for name in recipes)
    if tournament.engine == "inline":
        user_experiments = tournament.experiments
    make_engine = find_engine(tournament)
    config.check_pods(tournament, user_experiments)
    directory = user_path(directory)
    pods, count = tournament.pods, len(tournament.experiments)
    if pods < count and not holds_begun_tournament(directory):
        raise ConfigError(
            f"pods is {pods}, but there are {count} recipes, and pod i begins with recipe i: take "
            f"{count} pods or more, or fewer recipes."
        )
    info = TournamentInfo(directory, lambda: board.snapshot())
    attachments = [make(info) for make in find_attachments(attach, directory)]

    def tell_attachments() -> None:
        for attachment in attachments:
            attachment.sealed()

    def show(state: events.TournamentState) -> None:
        watch(state)
        tell_attachments()

    signals = StopSignals(
        f"Stopping once all pods have saved, within {GRACE_SECONDS:g} s",
        f"Stopped, and the pods have saved: run_tournament goes on in {directory}.",
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.installed())
        board = stack.enter_context(Leaderboard(directory, tournament.header()))
        for attachment in attachments:
            stack.enter_context(attachment)
        stack.callback(tell_attachments)  # the last events may follow the last call
        engine = make_engine(board.directory, recipes)
        stack.callback(engine.close)
        try:
            return Orchestrator(tournament, board, engine, signals, show).run()
        except RoundStopped as stop:
            return stop.exit_code


class Orchestrator:
    """The loop, with the attempts that are running."""

    def __init__(
        self,
        tournament: config.Tournament,
        board: Leaderboard,
        engine: Engine,
        signals: StopSignals,
        watch: Watch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tournament, self.board, self.engine = tournament, board, engine
        self._signals, self._watch, self._clock = signals, watch, clock
        self._running: dict[int, Attempt] = {}  # by token
        self._idle: dict[int, float] = {}  # other pods with rounds left, and when they may start
        self._losses: dict[int, int] = {}  # by pod: attempts that machines lost in a row
        self._lost: EngineLost | None = None  # after too many of them
        self._ready: dict[int, float] = {}  # generation to the time of its first ready pod
        self._shown, self._decided = -1, -1  # numbers of events
        self._next_look = -math.inf
        for number, pod in self.state.pods.items():
            if pod.status == "running" and pod.attempt:  # when an earlier process was killed
                directory = board.directory / "pods" / f"p{number}r{pod.round}"
                self._accept(Attempt(number, directory, 0.0), pod.attempt.token, 0)
            self._settle(number)

    @property
    def state(self) -> events.TournamentState:
        return self.board.state

    def run(self) -> int:
        """Run until no pod has rounds left. Returns and raises as `run_tournament` does."""
        while True:
            self._take_in()
            if self._signals.exit_code:
                return self._leave()
            if self._lost is not None:
                self._leave()
                raise self._lost
            if self._clock() >= self._next_look:
                self._next_look = self._clock() + LOOK_SECONDS
                self._decided = -1  # a pod may have waited long enough
                self._kill_stalled()
            if self.engine.is_ready and self.state.events != self._decided:
                self._start_waiting()
            if self.state.events != self._shown:
                self._shown = self.state.events
                self.board.collect_garbage()
                self._watch(self.state)
            if not self._running and not self._waiting():
                self._check_all_finished()
                return 0
            time.sleep(PAUSE_SECONDS)

    def _check_all_finished(self) -> None:
        """Raise `PodracerError` if pods were quarantined: then not all rounds were done."""
        reasons: dict[str, list[str]] = {}
        for number, pod in self.state.pods.items():
            if pod.status == "quarantined":
                reasons.setdefault(pod.reason, []).append(str(number))
        count = sum(map(len, reasons.values()))
        if not count:
            return
        text = "; ".join(f"pod {', '.join(pods)}: {reason}" for reason, pods in reasons.items())
        if count == len(self.state.pods):
            raise PodracerError(f"every pod has failed: {text}")
        raise PodracerError(
            f"{count} of {len(self.state.pods)} pods failed for good and are quarantined, the "
            f"others have finished: {text}"
        )

    # --- incoming reports -------------------------------------------------------------------------

    def _take_in(self) -> None:
        for token, code in self.engine.poll().items():
            attempt = self._running.pop(token)
            delay = self._end(attempt, token, code)
            self._settle(attempt.pod, delay)

    def _end(self, attempt: Attempt, token: int, code: int) -> float:
        """Record the end of an attempt; return the seconds until the pod may start again."""
        pod, reason = attempt.pod, self._accept(attempt, token, code)
        # One that was stopped, perhaps by a signal to all processes, has not failed.
        if reason is None or self._signals.exit_code or self._lost is not None:
            self._losses.pop(pod, None)
            return 0.0
        if attempt.is_stalled:
            reason = f"recorded nothing for {self.tournament.stall_seconds:g} s (stall_seconds)"
        fault = "machine" if code in MACHINE_CODES and not attempt.is_stalled else "pod"
        pod_state = self.state.pods[pod]
        assert pod_state.attempt is not None
        steps = self._restored(pod_state.attempt.experiment).driver.steps_per_update
        frames = saved_updates(attempt.directory) * steps
        self.board.fail(events.Failed(pod, pod_state.round, token, reason, frames, fault))
        if fault == "machine":
            return self._back_off(pod, reason, has_progress=frames > pod_state.frames)
        return 0.0

    def _back_off(self, pod: int, reason: str, *, has_progress: bool) -> float:
        """Return how long a pod waits after a loss, which doubles; the last one ends the loop."""
        self._losses[pod] = losses = 1 if has_progress else self._losses.get(pod, 0) + 1
        if losses >= LOSSES:
            self._lost = EngineLost(
                f"pod {pod} was lost {losses} times in a row, by no fault of its own ({reason}); "
                "when its machines are sound, podracer resume continues the tournament"
            )
        return min(2.0 ** (losses - 1), BACK_OFF_SECONDS)

    def _settle(self, pod: int, delay: float = 0.0) -> None:
        """Quarantine a pod that does not run, or note if it has rounds left and when it starts."""
        pod_state = self.state.pods[pod]
        if pod_state.status == "failed" and pod_state.failures >= self.tournament.retries:
            self.board.record(events.Stopped(pod, "quarantined", pod_state.reason))
        elif pod_state.is_live and pod_state.round < self.tournament.rounds:
            self._idle[pod] = self._clock() + delay
        else:
            self._idle.pop(pod, None)

    def _accept(self, attempt: Attempt, token: int, code: int) -> str | None:
        """Submit an attempt's report; return None if accepted, else why the attempt failed."""
        try:
            # Whatever the exit code: the report comes last, and a library may crash at the exit.
            report = read_report(attempt.directory, token)
        except PodracerError as error:
            return reason_of_failure(attempt.directory, code) if code else str(error)
        if report is None:
            return reason_of_failure(attempt.directory, code)
        round, evaluation = self.state.pods[attempt.pod].round, self.tournament.evaluation
        submitted = events.Submitted(attempt.pod, round, evaluation=evaluation, **report)
        reason = self.board.submit(submitted)
        return reason and f"its report was refused: {reason}"

    # --- starts of rounds -------------------------------------------------------------------------

    def _waiting(self) -> list[tuple[int, int]]:
        """Return idle pods with their next rounds, the furthest behind first."""
        waiting = ((number, self.state.pods[number].round) for number in self._idle)
        return sorted(waiting, key=lambda item: (item[1], item[0]))

    def _start_waiting(self) -> None:
        """Decide for all idle pods first, so that all see the same state, then start them."""
        self._decided, time_of_pass = self.state.events, self._clock()
        decisions: list[tuple[int, int, dict[str, Any]]] = []
        waiting_rounds = set[int]()  # what one pod of a round waits for, all others wait for
        for pod, round in self._waiting():
            if self._idle.get(pod, time_of_pass) > time_of_pass:
                continue
            earlier = self.state.pods[pod].attempt  # at this round, whose decision stands
            decision = earlier and {name: getattr(earlier, name) for name in DECISION}
            if decision is None and round not in waiting_rounds:
                decision = self._decide(pod, round)
            if decision is None:
                waiting_rounds.add(round)
            else:
                decisions.append((pod, round, decision))
        for round in waiting_rounds:
            # Pods that a generation has waited for too long are absent.
            waited = time_of_pass - self._ready.setdefault(round, time_of_pass)
            for number, pod in self.state.pods.items():
                is_late = pod.is_live and pod.round == round - 1 and not pod.absent
                if is_late and waited > self.tournament.straggler_seconds:
                    self.board.record(events.Absent(number, pod.round))
        for pod, round, decision in decisions:
            if self._signals.exit_code:  # since an inline start, which is a whole round
                break
            self._start(pod, round, decision)

    def _decide(self, pod: int, round: int) -> dict[str, Any] | None:
        """Return the decision of a round; None if it has to wait."""
        rng = selection.generator(self.tournament.seed, pod, round)
        view = selection.SelectionView(self.state, pod, round)
        start = selection.choose(self.tournament.selection, view, rng)
        if start is None:
            return None
        experiment = self._experiment(pod, start)
        return {
            "parents": start.parents,
            "hyperparameters": hyperparameters(experiment.agent),
            "experiment": to_json(experiment),
        }

    def _experiment(self, pod: int, start: selection.Start) -> Experiment:
        """Return the parent's experiment, or the pod's own, with the chosen hyperparameters."""
        experiment = self.tournament.experiment_of(pod)
        if start.parents:
            parent = events.find_entry(self.state, pod, start.parents[0])
            experiment = self._restored(parent.experiment)
            if parent.pod != pod:
                experiment = config.with_pod_seeds(experiment, self.tournament.seed, pod)
        current = hyperparameters(experiment.agent)
        changed = {k: v for k, v in start.hyperparameters.items() if current.get(k) != v}
        agent = with_hyperparameters(experiment.agent, changed)
        pods = tuple(config.with_values(member, changed) for member in experiment.pods)
        return dataclasses.replace(experiment, agent=agent, pods=pods)

    def _start(self, pod: int, round: int, decision: dict[str, Any]) -> None:
        started = self.board.start(pod, round, **decision)

        def reference(name: str) -> Reference:
            entry = events.find_entry(self.state, pod, name)
            return Reference(name, entry.checkpoint, entry.digest)

        task = Task(
            pod,
            round,
            started.token,
            self._restored(started.experiment),
            tuple(map(reference, started.parents)),
            self.tournament.round_frames,
            self.tournament.round_seconds,
            self.tournament.evaluation_seed,
            self.tournament.episodes,
        )
        directory = self.board.directory / "pods" / f"p{pod}r{round}"
        write_task(directory, task)
        self.engine.start(started.token, directory)
        self._idle.pop(pod, None)
        self._running[started.token] = Attempt(pod, directory, self._clock())

    def _restored(self, experiment: Mapping[str, Any]) -> Experiment:
        return config.restore_experiment(experiment, self.tournament.experiments)

    # --- failures and the end ---------------------------------------------------------------------

    def _kill_stalled(self) -> None:
        for token, attempt in self._running.items():
            # An attempt that waits for a machine has not begun.
            if token in self.engine.waiting or attempt.has_recorded():
                attempt.beat = self._clock()
            elif self._clock() - attempt.beat > self.tournament.stall_seconds:
                attempt.is_stalled = True
                self.engine.kill(token)

    def _leave(self) -> int:
        """Stop all pods, so that they save; return the exit code."""
        for token in self._running:
            self.engine.stop(token)
        deadline = self._clock() + GRACE_SECONDS
        while self._running and self._clock() < deadline:
            self._take_in()
            time.sleep(PAUSE_SECONDS)
        if self._running:
            _LOG.warning(
                "killed pods that did not end in %g s, which continue from their last save: %s.",
                GRACE_SECONDS,
                ", ".join(map(str, sorted(x.pod for x in self._running.values()))),
            )
        return self._signals.exit_code or PREEMPTED
