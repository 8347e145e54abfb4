"""Several processes as one run, on loopback."""

import dataclasses
import json
import math
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import orbax.checkpoint as orbax_checkpoint
import pytest
from child import call, environment, fingerprint, finish, records, start, wait_for_lines
from jax._src import clusters  # of which `jax.distributed.initialize` is the public side

import podracer
from podracer.cli import train
from podracer.devices import mesh, peers
from podracer.devices.peers import PeerLostError
from podracer.devices.startup import (
    Hosts,
    check_not_alone,
    initialize_devices,
    prepare_cache,
    use_compilation_cache,
)
from podracer.errors import ConfigError, StorageError
from podracer.io.checkpoint import Checkpointer
from podracer.run.errors import classify_error
from podracer.run.loading import reopen

RUN = (
    "train", "catch_a2c", "--num-envs", 16, "--rollout-length", 8, "--updates-per-chunk", 10,
    "--hidden", 16, "--devices", 2, "--evaluations", 2,
)  # fmt: skip
STEPS = 16 * 8


def hosts(arguments, number=2, flags=((), ())):
    """Start a process for each of `flags`, of a run of so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    join = ("--coordinator", address, "--num-processes", number, "--process-id")
    return [start(*arguments, *own_flags, *join, i) for i, own_flags in enumerate(flags)]


def end(processes, expected):
    """All must leave with this code."""
    results = [finish(process) for process in processes]
    assert [code for code, _, _ in results] == [expected] * len(processes), results


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Two processes of one device each, from the first update to the last."""
    run = tmp_path_factory.mktemp("hosts") / "run"
    end(hosts((*RUN, "--frames", STEPS * 60, "--run-dir", run)), 0)
    return run


def test_two_processes_train_as_one_with_the_same_devices(one, tmp_path):
    """Every parameter as in one process with two devices, to the rounding of the sums."""
    alone = tmp_path / "alone"
    podracer.train(reopen(one), run_dir=alone, devices=2)
    for together, single in zip(records(one), records(alone), strict=True):
        assert together.keys() == single.keys()
        for name, value in together.items():
            assert value == pytest.approx(single[name], rel=1e-3, abs=1e-4), name
    assert json.loads((one / "config.json").read_text())["device"]["processes"] == 2


@pytest.mark.parametrize(("processes", "devices"), [(1, 2), (2, 2), (3, 0)])
def test_a_run_takes_the_devices_that_it_had_where_its_processes_can_share_them(
    processes, devices, one, monkeypatch
):
    """Nobody gave --devices, so no refusal may name it: three processes take all that there are."""
    monkeypatch.setattr(train, "initialize_devices", lambda _, count, arch: throw(Taken(count)))
    experiment = dataclasses.replace(reopen(one), devices=0)
    with pytest.raises(Taken) as error:
        train.run(experiment, one, Hosts("h:1", processes, 0), (), resume=True)
    assert error.value.args == (devices,)


class Taken(Exception):
    """The number of devices that a command asked for."""


@pytest.mark.figure(19)
@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_and_resume_is_exact(one, tmp_path):
    run = tmp_path / "run"
    processes = hosts((*RUN, "--frames", STEPS * 60_000, "--save-seconds", 0, "--run-dir", run))
    wait_for_lines(processes[0], run, 2)
    processes[1].send_signal(signal.SIGTERM)
    end(processes, 75)
    saved = records(run)
    for interrupted, whole in zip(saved, records(one), strict=False):
        shared = interrupted.keys() & whole.keys()  # evaluations fall elsewhere
        assert {k: interrupted[k] for k in shared} == {k: whole[k] for k in shared}
    end(hosts(("resume", run, "--frames", STEPS * (saved[-1]["updates"] + 10))), 0)
    assert records(run)[-1]["updates"] == saved[-1]["updates"] + 10
    assert len(fingerprint(run)) == 64


@pytest.mark.slow
def test_processes_reach_a_limit_of_seconds_together(tmp_path):
    """Each has its own clock; the second would wait for the first, which had ended."""
    run = tmp_path / "run"
    limits = ("--frames", 10**9, "--max-seconds", 3, "--save-seconds", 1)
    end(hosts((*RUN, *limits, "--run-dir", run)), 0)
    newest = max(int(path.name) for path in (run / "checkpoints").glob("[0-9]*"))
    assert newest == records(run)[-1]["updates"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["catch_a2c", "cartpole_ppo", "sebulba"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 1), (2, 3)])
def test_a_run_goes_on_with_another_number_of_processes(recipe, before, after, tmp_path):
    """Exactly with the same, correctly with another, refused where they cannot share evenly."""
    names = ("catch", "--arch", "sebulba", "--policy-lag", 0) if recipe == "sebulba" else (recipe,)
    arguments = (
        "train", *names, "--num-envs", 16, "--rollout-length", 8, "--updates-per-chunk", 5,
        "--hidden", 16, "--evaluations", 0,
    )  # fmt: skip
    run, twin, frames = tmp_path / "run", tmp_path / "twin", ("--frames", STEPS * 20)

    def together(number, *command):
        results = [finish(process) for process in hosts(command, number, ((),) * number)]
        return {code for code, _, _ in results}, results[0][2]

    assert together(before, *arguments, "--frames", STEPS * 10, "--run-dir", run)[0] == {0}
    codes, error = together(after, "resume", run, *frames)
    if 16 % after:
        assert codes == {78}
        assert "num_envs is 16, which 3 " in error
        assert "take 2 or 4 " in error
        assert "--devices" not in error  # nobody gave it
        return
    assert codes == {0}
    assert ("correct, but not bit-exact" in error) == (before != after)
    assert [record["updates"] for record in records(run)] == [5, 10, 15, 20]
    assert together(before, *arguments, *frames, "--run-dir", twin)[0] == {0}
    assert before != after or fingerprint(run) == fingerprint(twin)


# --- a process that is lost -----------------------------------------------------------------------

SURVIVAL_SECONDS = 60  # of the heartbeats' 10, on a machine that does other things


def lose(processes, run, lost, number, lines=3):
    """Send a signal to one of two processes in mid-run; return how long the other went on."""
    wait_for_lines(processes[0], run, lines)
    processes[lost].send_signal(number)
    moment = time.monotonic()
    code, _, error = finish(processes[1 - lost], SURVIVAL_SECONDS)
    assert code == 77, error
    assert "podracer: another process of the run is lost" in error
    crash = json.loads((run / "crash.json").read_text())
    assert (crash["code"], crash["component"]) == (77, "peer")
    processes[lost].kill()
    finish(processes[lost])
    return time.monotonic() - moment


@pytest.mark.figure(19)
@pytest.mark.usefixtures("nothing_listens")
@pytest.mark.slow
def test_the_loss_of_a_process_ends_the_other_with_77(tmp_path):
    """And meanwhile the coordinator listens on the address that it was given, of the loopback."""
    run = tmp_path / "run"
    lose(hosts((*RUN, "--frames", 10**9, "--run-dir", run)), run, 1, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.figure(19)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_resumes_exactly_after_the_loss_of_a_process(lost, number, tmp_path, cases):
    run = tmp_path / "run"
    processes = hosts((*RUN, "--frames", STEPS * 60_000, "--save-seconds", 0, "--run-dir", run))
    cases.note(f"{lose(processes, run, lost, number):.1f} s")
    frames = ("--frames", STEPS * (records(run)[-1]["updates"] + 10))
    end(hosts(("resume", run, *frames)), 0)
    twin = tmp_path / "twin"
    end(hosts((*RUN, *frames, "--run-dir", twin)), 0)
    assert fingerprint(run) == fingerprint(twin)


@pytest.mark.figure(19)
@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_processes_that_cannot_talk_have_lost_one(kind, monkeypatch):
    """Where a result is read JAX raises the same as a ValueError."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    error = classify_error(kind("UNKNOWN: Gloo AllGather failed: Connection closed by peer"))
    assert isinstance(error, peers.PeerLostError)
    assert (error.exit_code, error.component) == (77, "peer")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "INTERNAL: Failed to open libtpu.so",
            "JAX cannot start the platform tpu: INTERNAL: Failed",
        ),
        ("[enforce fail at gloo/device.cc:99] rv == 0. -3 vs 0", "no address for its own name"),
    ],
)
def test_a_platform_that_does_not_start_is_a_device_that_fails(reason, words):
    error = classify_error(RuntimeError(f"Unable to initialize backend 'tpu': {reason}"))
    assert words in str(error)
    assert error.exit_code == 71


@pytest.mark.figure(19)
@pytest.mark.parametrize("waits_for", ["arrays", "digests"])
@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (jax.errors.JaxRuntimeError("UNAVAILABLE: ... coordination_service ..."), PeerLostError),
        (jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out."), PeerLostError),
        (None, StorageError),
    ],
)
def test_a_process_that_is_lost_during_a_save_is_not_a_file_that_cannot_be_written(
    cause, kind, waits_for, tmp_path, monkeypatch
):
    """Orbax calls it a time-out that processes cannot wait for each other; JAX raises its own."""

    def wait():
        if cause and waits_for == "digests":
            raise cause
        raise TimeoutError("Timed out while waiting for async_write_complete barrier.") from cause

    nothing = lambda *_, **__: None  # noqa: E731
    orbax = SimpleNamespace(save=nothing, wait_until_finished=wait, close=nothing)
    monkeypatch.setattr(orbax_checkpoint, "AsyncCheckpointer", lambda handler: orbax)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": jax.numpy.zeros(2)}, {})
    with pytest.raises((jax.errors.JaxRuntimeError, StorageError)) as raised:
        checkpointer.wait()
    checkpointer.save(2, {"x": jax.numpy.zeros(2)}, {})
    checkpointer.__exit__(KeyError, KeyError("the first error is raised"), None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert isinstance(classify_error(raised.value), kind)


@pytest.mark.figure(19)
def test_an_abort_becomes_exit_code_77_with_a_report():
    """JAX aborts where another process is lost, and Python hears nothing of it."""
    child = """
import os
from podracer.devices import peers
from podracer.run.errors import classify_error
peers.on_abort.install()
with peers.reports_loss(lambda error: print("reported", type(error).__name__)):
    os.abort()
"""
    result = subprocess.run(
        [sys.executable, "-c", child], env=environment(), capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (77, "reported PeerLostError\n")
    assert result.stderr.startswith("podracer: another process of the run is lost")


# --- before a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"agent": {"learning_rate": 0.5}}, "agent.learning_rate is 0.1 in process 0 and 0.5 in"),
        ({"versions": {"jax": "9"}}, "versions.jax is 1 in process 0 and 9 in process 1"),
        ({}, None),
    ],
)
def test_processes_with_other_configurations_are_refused(other, message, monkeypatch):
    same = {"agent": {"learning_rate": 0.1}, "versions": {"jax": "1"}}
    monkeypatch.setattr(
        mesh, "gather_texts", lambda text: [text, json.dumps(json.loads(text) | other)]
    )
    if message is None:
        mesh.check_same_configuration(same)
        return
    with pytest.raises(ConfigError, match=message):
        mesh.check_same_configuration(same)


def test_a_module_that_computes_while_it_is_imported_is_blamed_for_its_devices(monkeypatch):
    assert jax.local_device_count() == 8  # which begins JAX
    with pytest.raises(ConfigError, match=r"begun with 8 CPU device.*NumPy, or set JAX_NUM_CPU_D"):
        initialize_devices(Hosts(), 3)
    monkeypatch.setattr(jax, "local_device_count", lambda: 3)
    initialize_devices(Hosts(), 3)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (Hosts("127.0.0.1", 2, 0), "`coordinator=127.0.0.1` must be HOST:PORT"),
        (Hosts("127.0.0.1:1234", 2, 2), "`process_id=2` must lie below `num_processes=2`"),
        (Hosts("127.0.0.1:1234", 2), "together"),
        (Hosts("127.0.0.1:1234", 2, 0, join_seconds=0.0), "`join_seconds` must be above 0"),
        (Hosts("127.0.0.1:1234", 2, 0, join_seconds=math.inf), "at most 604,800, but it is inf"),
        (Hosts("127.0.0.1:0", 2, 1), "with a port from 1 to 65,535"),
        (Hosts("127.0.0.1:65536", 2, 1), "with a port from 1 to 65,535"),
        (Hosts("192.0.2.1:1234", 2, 0), "process 0 cannot listen on 192.0.2.1:1234"),
    ],
)
def test_processes_that_cannot_join_are_told_why(hosts, message, monkeypatch):
    monkeypatch.setattr(peers.on_abort, "install", lambda: None)
    with pytest.raises(ConfigError, match=message):
        initialize_devices(hosts, 0)


def test_a_number_that_is_taken_is_refused_before_it_joins():
    claims = [peers.claim_number("127.0.0.1:1", number) for number in (0, 1)]
    with pytest.raises(ConfigError, match=r"process 1 of the run at 127\.0\.0\.1:1 is on this"):
        peers.claim_number("127.0.0.1:1", 1)
    os.close(claims[1])  # as at the end of the process
    claims[1] = peers.claim_number("127.0.0.1:1", 1)
    for claim in claims:
        os.close(claim)


UNKNOWN = socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize("number", [0, 1])
def test_a_coordinator_whose_name_is_not_known_yet_is_waited_for(
    number, joined, monkeypatch, capsys
):
    """Kubernetes knows the name of a pod some seconds after its start; exit code 78 is final."""
    find, errors = socket.getaddrinfo, [UNKNOWN] * 3
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *args: find(*args) if not errors else throw(errors.pop())
    )
    monkeypatch.setattr(peers, "NAME_SECONDS", 0)
    monkeypatch.setattr(peers, "NOTICE_SECONDS", 0)
    initialize_devices(Hosts("localhost:1", 2, number, 60), 0)
    ((settings, _),) = joined
    assert (settings, errors) == (("localhost:1", 2, number), [])
    event = "localhost to be this machine" if number == 0 else "the name localhost"
    assert capsys.readouterr().err.count(f"podracer: waits at most 60 s for {event}") == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_coordinator_whose_name_stays_unknown_is_a_lost_peer(number, monkeypatch):
    """No mistake of the configuration (78), after which a job set would start no pod again."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: throw(UNKNOWN))
    monkeypatch.setattr(peers.on_abort, "install", lambda: None)
    with pytest.raises(PeerLostError, match=r"s for the name pod-0 of process 0 .*not known") as e:
        initialize_devices(Hosts("pod-0:1234", 2, number, 1e-9), 0)
    assert e.value.exit_code == 77


def throw(error):
    raise error


@pytest.fixture
def joined(monkeypatch):
    """Settings and options with which JAX was asked to join processes; nothing joins."""
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *settings, **o: calls.append((settings, o))
    )
    monkeypatch.setattr(peers.on_abort, "install", lambda: None)
    monkeypatch.setattr(peers, "claim_number", lambda *_: None)
    return calls


MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
OMPI = MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.9:1"}
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
SLURM = STEP | {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_NTASKS": "2"}
TPU = {
    "TPU_WORKER_HOSTNAMES": "localhost,t1", "TPU_WORKER_ID": "1", "MEGASCALE_SLICE_ID": "0",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost",  # or JAX asks a server of the cloud
}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "3"}


SLICES = TPU | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}
COORDINATOR = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:9"}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (OMPI, ("10.0.0.9:61441", 4, 1, [1])),
        (SLURM, ("node3:61447", 2, 1, [0])),
        (TPU, ("localhost:8482", 2, 1, None)),
        (SLICES, ("localhost:8482", 4, 3, None)),
        (MPI | COORDINATOR, ("127.0.0.1:9", 4, 1, None)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"} | COORDINATOR, ("127.0.0.1:9", 2, 1, None)),
        (POD | COORDINATOR | {"JAX_NUM_PROCESSES": "4"}, ("127.0.0.1:9", 4, 3, None)),
    ],
)
def test_processes_of_a_launcher_join_by_themselves(variables, found, joined, monkeypatch):
    """By JAX's own detection, which also gives each process of MPI and Slurm its GPU."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_not_alone(Hosts())
    initialize_devices(Hosts(), 0)
    ((settings, options),) = joined
    method = options["cluster_detection_method"]
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    complete = detect(*settings, None, method, 5) if method != "deactivate" else (*settings, None)
    assert complete == found


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (MPI, "one of 4 that Open MPI started .OMPI_.*SIZE., .* give `coordinator`, HOST:PORT of"),
        ({"PMI_SIZE": "2"}, "one of 2 that MPI started"),
        (POD, "number 3 of an indexed job of Kubernetes .*`coordinator`, .*, and `num_processes`"),
        ({"SLURM_NTASKS": "8"}, "the only one of a Slurm job of 8 tasks, .*: start it with srun"),
    ],
)
def test_a_process_of_a_job_refuses_to_train_alone(variables, sentence, monkeypatch):
    """Unless it is told to, by the flag that the sentence names."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"this process is {sentence}") as error:
        check_not_alone(Hosts(join_seconds=9))
    assert "or `num_processes=1` for a run of its own" in str(error.value)
    alone = Hosts(num_processes=1, join_seconds=9)
    check_not_alone(alone)
    assert alone.with_environment() == alone
    check_not_alone(Hosts("10.0.0.1:1234"))
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    check_not_alone(Hosts())
    initialize_devices(Hosts(), 0)
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
        {"TPU_WORKER_HOSTNAMES": "t0", "JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_a_process_that_has_no_other_trains(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_not_alone(Hosts())
    assert Hosts().with_environment() == Hosts()


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID"])
def test_one_variable_of_jax_is_not_ignored(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match="JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"):
        initialize_devices(Hosts(), 0)


def test_a_user_without_a_home_goes_on_without_a_cache(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert use_compilation_cache() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)


def test_the_folder_of_compiled_programs_is_private(tmp_path):
    folder = tmp_path / "podracer" / "xla"
    mask = os.umask(0)
    try:
        assert prepare_cache(folder)
    finally:
        os.umask(mask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700] * 2
    folder.chmod(0o777)
    (folder / "jit_program-cache").write_bytes(b"")
    assert prepare_cache(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not prepare_cache(folder / "jit_program-cache" / "xla")


@pytest.mark.slow
def test_a_process_whose_peers_never_start_says_so_and_ends(tmp_path):
    arguments = (*RUN, "--join-seconds", 6, "--run-dir", tmp_path / "run")
    (process,) = hosts(arguments, flags=((),))
    code, _, error = finish(process, 60)
    assert code == 77
    waits = "podracer: waits for all 2 processes of the run to join at 127.0.0.1:"
    assert waits in error
    assert "podracer: waited 6 s for all 2 processes" in error


@pytest.mark.slow
@pytest.mark.figure(4)
def test_a_sweep_goes_on_with_its_virtual_devices(tmp_path):
    sweep = ("sweep", "catch_a2c", "--vary", "learning_rate=1e-3", "--seeds", 2, "--hidden", 16)
    frames, whole, cut = 40_000 * STEPS, tmp_path / "whole", tmp_path / "cut"
    assert call(*sweep, "--frames", frames, "--evaluations", 1, "--run-dir", whole)[0] == 0
    process = start(*sweep, "--frames", frames, "--evaluations", 1, "--run-dir", cut)
    wait_for_lines(process, cut, 2)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75
    code, _, error = call("resume", cut)
    assert code == 0, error
    assert "bit-exact" not in error
    assert fingerprint(cut) == fingerprint(whole)
