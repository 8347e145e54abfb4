"""Several processes as one run, on loopback."""

import json
import signal
import socket

import pytest
from child import fingerprint, finish, records, start, wait_for_lines

from podracer.io.seal import read_sealed_json, seal_json

RUN = (
    "train", "catch_a2c", "--num-envs", 16, "--rollout-length", 8, "--updates-per-chunk", 10,
    "--hidden", 16, "--devices", 2, "--evaluations", 2,
)  # fmt: skip


def hosts(arguments, number=2):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        start(*arguments, "--coordinator", address, "--num-processes", number, "--process-id", i)
        for i in range(number)
    ]


def end(processes, expected):
    """All must leave with this code."""
    results = [finish(process) for process in processes]
    assert [code for code, _, _ in results] == [expected] * len(processes), results


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Two processes of one device each, from the first update to the last."""
    run = tmp_path_factory.mktemp("hosts") / "run"
    end(hosts((*RUN, "--frames", 16 * 8 * 60, "--run-dir", run)), 0)
    return run


def test_two_processes_train_as_one_with_the_same_devices(one, tmp_path):
    """Every parameter as in one process with two devices, to the rounding of the sums."""
    alone = tmp_path / "alone"
    code, _, error = finish(start(*RUN, "--frames", 16 * 8 * 60, "--run-dir", alone))
    assert code == 0, error
    for together, single in zip(records(one), records(alone), strict=True):
        assert together.keys() == single.keys()
        for name, value in together.items():
            assert value == pytest.approx(single[name], rel=1e-3, abs=1e-4), name
    assert json.loads((one / "config.json").read_text())["device"]["processes"] == 2


@pytest.mark.figure(19)
@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_and_resume_is_exact(one, tmp_path):
    run = tmp_path / "run"
    processes = hosts((*RUN, "--frames", 16 * 8 * 60_000, "--save-seconds", 0, "--run-dir", run))
    wait_for_lines(processes[0], run, 2)
    processes[1].send_signal(signal.SIGTERM)
    end(processes, 75)
    saved = records(run)
    for interrupted, whole in zip(saved, records(one), strict=False):
        shared = interrupted.keys() & whole.keys()  # evaluations fall elsewhere
        assert {k: interrupted[k] for k in shared} == {k: whole[k] for k in shared}
    config = read_sealed_json(run / "config.json")
    config["experiment"]["frames"] = 16 * 8 * (saved[-1]["updates"] + 10)
    seal_json(run / "config.json", config)
    end(hosts(("resume", run)), 0)
    assert records(run)[-1]["updates"] == saved[-1]["updates"] + 10
    assert len(fingerprint(run)) == 64
