"""A run: `Progress` in; metrics, evaluations, checkpoints and an end out."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jax

from podracer.agent import Agent
from podracer.drivers import population
from podracer.drivers.common import Progress, Request, TrainState, abstract_state
from podracer.environment import Environment, HasFrameSkip, HostEnvironments
from podracer.evaluate import Evaluation
from podracer.experiments import recipes, sweep
from podracer.experiments.experiment import (
    Experiment,
    check_same_experiment,
    read_experiment,
    to_json,
)
from podracer.experiments.plan import (
    Plan,
    build,
    check_same_environment,
    checked_spec,
    configuration,
    kept_environment,
    make_plan,
)
from podracer.io import checkpoint
from podracer.io.run_directory import RunLock, run_directory, write_crash, write_json
from podracer.io.signals import PREEMPTED, StopSignals, Stopwatch, Watchdog
from podracer.io.sinks import JsonlSink, Sink, Sinks, TensorBoardSink
from podracer.mesh import format_bytes, make_mesh, wait_for_all_processes
from podracer.reports.console import Console
from podracer.types import ConfigError, LearnerState, PodracerError


class DeviceError(PodracerError):
    """The accelerator failed or ran out of memory."""

    exit_code = 71


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended."""

    agent: Agent
    state: LearnerState
    metrics: dict[str, Any]  # the last record
    evaluation: Evaluation | None  # the last one of this process
    run_dir: Path
    exit_code: int  # 0 done; 75 preempted, 130 stopped by the user, both saved


@dataclasses.dataclass
class Totals:
    """What the host counts; part of every checkpoint."""

    updates: int = 0
    frames: int = 0
    seconds: float = 0.0
    evaluation_return: float | None = None  # the last one
    collected: int = 0  # steps that actors finished, learned from or not
    dropped: int = 0  # those that were finished, but lost when the run stopped


def train(
    experiment: Experiment | str,
    *,
    environment: Environment | HostEnvironments | str | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    begin: Callable[[Plan], tuple[TrainState, Totals]] | None = None,
    show: bool = False,
    **overrides: Any,
) -> Result:
    """Run an experiment, or a recipe by its name, to its end; everything is left in `run_dir`.

    `environment`, a name or an object, takes the place of the experiment's own; `overrides` replace
    its other fields; `show` reports to the terminal. With `resume` the newest valid checkpoint of
    `run_dir` goes on, exactly; `begin` makes the first state of a run that does not begin afresh.
    SIGTERM and Ctrl-C end the run after the chunk at hand, saved.

    Raises `ConfigError` before any compile for what cannot run; later `NonFiniteError`,
    `CheckpointError`, `StorageError` or `DeviceError`, with the reason left in `crash.json`.
    """
    experiment = recipes.find(experiment) if isinstance(experiment, str) else experiment
    if isinstance(environment, str):
        overrides["environment"], environment = environment, None
    experiment = dataclasses.replace(experiment, **overrides)
    experiment.check()
    use_compilation_cache()
    if environment is not None:
        name = checked_spec(environment).name
        experiment = dataclasses.replace(experiment, environment=name)
    plan = make_plan(experiment, environment)
    directory = _claim(experiment, run_dir, resume)
    wait_for_all_processes("directory claimed")  # or a slow process would find a fast one's run
    run = Run(experiment, plan, directory, show, begin)
    with RunLock(directory) if run.is_main else contextlib.nullcontext():
        try:
            return run.execute(resume)
        except Exception as error:
            error = _classified(error)
            write_crash(
                directory,
                error,
                component=getattr(error, "component", "learner"),
                last_update=run.totals.updates,
                last_checkpoint=run.saved,
                experiment=to_json(experiment),
            )
            raise error from error.__cause__


def load(
    run_dir: str | Path,
    *,
    environment: Environment | HostEnvironments | None = None,
    pod: int | None = None,
) -> tuple[Agent, LearnerState]:
    """The agent of a run and its state at the newest valid checkpoint, on one device.

    Of a population it is that of one pod: the given one, or the best in the last evaluation.
    """
    agent, _, state = load_run(run_dir, environment=environment, pod=pod)
    return agent, state.learner


def load_run(
    run_dir: str | Path,
    *,
    environment: Environment | HostEnvironments | None = None,
    pod: int | None = None,
) -> tuple[Agent, Environment | HostEnvironments, TrainState]:
    """The agent, the environment and the whole state of a run at its newest valid checkpoint.

    Raises `ConfigError` if there is no run, `CheckpointError` if nothing in it can be trusted.
    """
    directory = Path(run_dir)
    experiment = read_experiment(directory)
    agent, env = build(experiment, environment)
    one = jax.local_devices()[:1]
    if experiment.pods:
        pod = sweep.best_pod(directory) if pod is None else pod
        if not 0 <= pod < len(experiment.pods):
            raise ConfigError(f"{directory} has pods 0 to {len(experiment.pods) - 1}, no {pod}.")
        mesh = population.population_mesh(one, len(experiment.pods))
        like = population.abstract_states(agent, experiment.pods, env, mesh, experiment.chunk)
        states = checkpoint.load(directory / "checkpoints", like).state
        agent = dataclasses.replace(experiment.of_pod(experiment.pods[pod]).agent, spec=agent.spec)
        return agent, env, jax.tree.map(lambda x: x[pod], states)
    kept = kept_environment(experiment, env)
    like = abstract_state(agent, kept, make_mesh(one), experiment.chunk)
    return agent, env, checkpoint.load(directory / "checkpoints", like).state


class Run:
    """One process's part in a run."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        directory: Path,
        show: bool,
        begin: Callable[[Plan], tuple[TrainState, Totals]] | None = None,
    ) -> None:
        self.experiment, self.plan, self.begin = experiment, plan, begin
        self.agent, self.env, self.mesh = plan.agent, plan.env, plan.mesh
        self.directory, self.show = directory, show
        self.is_main = jax.process_index() == 0
        self.totals = Totals()
        self._collected_before = 0  # of the run that goes on
        self.saved: int | None = None  # updates at the newest checkpoint
        self._pods: Sink | None = None  # of a population: a record of each pod

    def execute(self, resume: bool) -> Result:
        """From the first or the restored state to the end."""
        signals = StopSignals()
        with contextlib.ExitStack() as stack:
            stack.enter_context(signals.installed())
            watchdog = Watchdog(self.experiment.stall_seconds, self._stalled)
            stack.enter_context(watchdog)
            checkpointer = checkpoint.Checkpointer(self.directory / "checkpoints")
            stack.enter_context(checkpointer)
            state = self._restored(checkpointer) if resume else None
            if state is None:
                state = self._fresh()
            sinks = stack.enter_context(self._sinks(resume))
            if self.experiment.pods:
                self._pods = stack.enter_context(contextlib.closing(self._pods_sink(resume)))
            return self._consume(state, checkpointer, sinks, signals, watchdog)

    def _fresh(self) -> TrainState:
        if self.is_main:
            write_json(self.directory / "config.json", configuration(self.experiment, self.plan))
        if self.begin is None:
            return self.plan.init()
        state, totals = self.begin(self.plan)
        self._count_on_from(totals)
        return state

    def _restored(self, checkpointer: checkpoint.Checkpointer) -> TrainState | None:
        """The newest checkpoint's state; None if the run was killed before its first save."""
        if not checkpointer.directory.exists() or not any(checkpointer.directory.iterdir()):
            return None
        check_same_environment(self.directory, self.env)
        restored = checkpointer.restore(self.plan.like)
        check_same_experiment(restored.metadata["experiment"], to_json(self.experiment))
        if restored.metadata["devices"] != self.mesh.size and self.is_main:
            print(
                f"podracer: saved on {restored.metadata['devices']} devices, going on with "
                f"{self.mesh.size}: correct, but not bit-exact."
            )
        self._count_on_from(Totals(**restored.metadata["totals"]))
        self.saved = restored.step
        return restored.state

    def _count_on_from(self, totals: Totals) -> None:
        """What was in flight when the run stopped is lost."""
        steps = self.experiment.driver.steps_per_update // jax.process_count()
        totals.dropped = totals.collected - totals.updates * steps if totals.collected else 0
        self.totals, self._collected_before = totals, totals.collected

    def _sinks(self, resume: bool) -> Sinks:
        if not self.is_main:
            return Sinks([])
        updates = self.totals.updates if resume else None
        sinks: list[Sink] = [
            JsonlSink(self.directory / "metrics.jsonl", resume_updates=updates),
            TensorBoardSink(self.directory / "tensorboard", resume_updates=updates),
        ]
        if self.show:
            kind = self.mesh.devices.flat[0].device_kind
            sinks.append(
                Console(
                    self.experiment.num_updates,
                    self.directory.name,
                    recipe=self.experiment.recipe,
                    devices=f"{self.mesh.size} x {kind}",
                    memory=format_bytes(self.plan.state_bytes),
                )
            )
        return Sinks(sinks)

    def _pods_sink(self, resume: bool) -> JsonlSink:
        updates = self.totals.updates if resume else None
        return JsonlSink(self.directory / "pods.jsonl", resume_updates=updates)

    def _consume(
        self,
        state: TrainState,
        checkpointer: checkpoint.Checkpointer,
        sinks: Sinks,
        signals: StopSignals,
        watchdog: Watchdog,
    ) -> Result:
        """The training loop: each chunk recorded; at boundaries evaluated, saved, stopped."""
        experiment, totals = self.experiment, self.totals
        times = Stopwatch()
        record: dict[str, Any] = {}
        evaluation: Evaluation | None = None
        exit_code, learner = 0, state.learner
        with contextlib.closing(self._progress(state, signals, times)) as progresses:
            for progress in progresses:
                watchdog.alive()
                with _blamed("checkpointer"):
                    checkpointer.check()
                record = self._record(progress, times)
                if progress.state is None:
                    self._write(sinks, record, progress)
                    continue
                learner = progress.state.learner
                if progress.updates in experiment.evaluation_updates:
                    with _blamed("evaluator"):
                        evaluation = self.plan.evaluate(progress.state)
                    record["evaluation_return"] = float(evaluation.returns.mean())
                    record["evaluation_length"] = float(evaluation.lengths.mean())
                    totals.evaluation_return = record["evaluation_return"]
                    times.add("time_evaluate")
                    if progress.pods is not None:
                        progress.pods["evaluation_return"] = evaluation.returns.mean(axis=-1)
                self._write(sinks, record, progress)
                done = self._is_done()
                if done or progress.request:
                    with _blamed("checkpointer"):
                        self._save(checkpointer, progress.state)
                    times.add("time_save")
                if done or progress.request == Request.STOP:
                    exit_code = 0 if done else signals.exit_code or PREEMPTED
                    break
        with _blamed("checkpointer"):
            checkpointer.wait()
        return Result(self.agent, learner, record, evaluation, self.directory, exit_code)

    def _write(self, sinks: Sinks, record: dict[str, Any], progress: Progress) -> None:
        sinks.write(record)
        if self._pods is not None and progress.pods is not None:
            self._pods.write({"updates": progress.updates, **progress.pods})

    def _progress(
        self, state: TrainState, signals: StopSignals, times: Stopwatch
    ) -> Generator[Progress]:
        experiment = self.experiment
        if self._is_done():
            return

        def request() -> Request:
            if signals.exit_code:
                return Request.STOP
            if self._is_done():
                return Request.SAVE
            overdue = times.since("time_save") >= experiment.save_seconds
            return Request.SAVE if overdue else Request.NONE

        yield from self.plan.drive(
            state=state,
            num_updates=experiment.num_updates,
            request=request,
            boundary=experiment.evaluation_updates.__contains__,
        )

    def _record(self, progress: Progress, times: Stopwatch) -> dict[str, Any]:
        """One line of the log; a chunk's speed leaves out compiling, evaluating and saving."""
        lap = times.lap()
        compiling = progress.compile_seconds
        stepping = lap["time_step"] = max(lap["time_step"] - compiling, 1e-9)
        self.totals.updates = progress.updates
        self.totals.frames += progress.frames
        self.totals.seconds += sum(lap.values()) + compiling
        return {
            "updates": progress.updates,
            "frames": self.totals.frames,
            "seconds": self.totals.seconds,
            "frames_per_second": progress.frames / stepping,
            **progress.metrics,
            **self._accounts(progress),
            "time_compile": compiling,
            **lap,
        }

    def _accounts(self, progress: Progress) -> dict[str, int]:
        """What became of the steps that this host's actors took: nothing is lost unaccounted."""
        if progress.collected is None:
            return {}
        totals = self.totals
        totals.collected = self._collected_before + progress.collected
        steps = self.experiment.driver.steps_per_update // jax.process_count()
        learned = progress.updates * steps
        accounts = {
            "steps_collected": totals.collected,
            "steps_learned": learned,
            "steps_in_flight": totals.collected - learned - totals.dropped,
            "steps_dropped": totals.dropped,
        }
        if isinstance(self.env, HasFrameSkip):
            accounts["emulator_frames"] = totals.frames * self.env.frame_skip
        return accounts

    def _is_done(self) -> bool:
        target, reached = self.experiment.target_return, self.totals.evaluation_return
        if target is not None and reached is not None and reached >= target:
            return True
        limit = self.experiment.max_seconds
        if limit is not None and self.totals.seconds >= limit:
            return True
        return self.totals.updates >= self.experiment.num_updates

    def _save(self, checkpointer: checkpoint.Checkpointer, state: TrainState) -> None:
        metadata = {
            "totals": dataclasses.asdict(self.totals),
            "experiment": to_json(self.experiment),
            "devices": self.mesh.size,
        }
        checkpointer.save(self.totals.updates, state, metadata)
        self.saved = self.totals.updates

    def _stalled(self, message: str) -> None:
        stalled = PodracerError(message)
        write_crash(
            self.directory,
            stalled,
            code=76,
            component="watchdog",
            last_update=self.totals.updates,
            last_checkpoint=self.saved,
        )


@contextlib.contextmanager
def _blamed(component: str) -> Iterator[None]:
    """An error within names this component in `crash.json`."""
    try:
        yield
    except Exception as error:
        error.component = component  # type: ignore[attr-defined]
        raise


# --- the run directory ---------------------------------------------------------------------------


def _claim(experiment: Experiment, run_dir: str | Path | None, resume: bool) -> Path:
    """The run's directory: new for a new run, with a run in it for one that goes on."""
    if run_dir is None:
        if jax.process_count() > 1:
            raise ConfigError("several processes need a run directory that all of them share.")
        moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run_dir = Path("runs") / f"{experiment.recipe}-s{experiment.seed}-{moment}"
    path = Path(run_dir)
    directory = run_directory(path.parent, path.name)
    exists = (directory / "config.json").exists()
    if resume and not exists:
        raise ConfigError(f"{directory} holds no run: there is no config.json in it.")
    if exists and not resume:
        raise ConfigError(f"{directory} already holds a run: resume it, or choose another name.")
    return directory


def use_compilation_cache() -> Path:
    """Keep compiled programs between processes, where the user has set no cache yet."""
    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    if configured is not None:
        return Path(configured)
    cache = Path.home() / ".cache" / "podracer" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return cache


def _classified(error: Exception) -> Exception:
    """XLA's failures as a sentence and an exit code; everything else as it is."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return error
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text:
        advice = "out of device memory: take fewer environments, a shorter rollout or more devices."
    elif "DATA_LOSS" in text or "INTERNAL" in text:
        advice = "the device failed: resume on a healthy one."
    else:
        return error
    failure = DeviceError(f"{advice} ({text.strip().splitlines()[0][:300]})")
    failure.__cause__ = error
    return failure
