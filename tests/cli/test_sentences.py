"""Errors and warnings speak of fields; the command line says the same of flags."""

import dataclasses

import pytest

from podracer import recipes
from podracer.cli.sentences import FIELD_NAMES, in_flags
from podracer.config.experiment import Experiment
from podracer.devices.startup import Hosts
from podracer.run.setup import build
from podracer.run.warnings import run_warnings
from podracer.tournament.config import Tournament


@pytest.mark.parametrize(
    ("sentence", "in_words_of_flags"),
    [
        ("take `evaluations=0`", "take --evaluations 0"),
        ("run it with `driver.fused=False`.", "run it with --no-driver.fused."),
        ("take `driver=podracer.SebulbaConfig()`", "take --driver sebulba"),
        ('the file: `agent.rule_file="disco_103.npz"`', "the file: --update-rule disco_103.npz"),
        ("give `exchange.rule`, or `exchange.peers`", "give --select, or --average"),
        ("`podracer list recipes` names them", "`podracer list recipes` names them"),
    ],
)
def test_a_field_becomes_its_flag(sentence, in_words_of_flags):
    assert in_flags(sentence) == in_words_of_flags


def test_a_sentence_in_python_names_a_field_and_on_the_command_line_its_flag():
    experiment = recipes.find("catch_a2c").with_arch("sebulba")
    values = {"evaluations": 0, "target_return": 1.0}
    experiment = experiment.with_fields(values)
    (warning,) = run_warnings(experiment, build(experiment)[0])
    assert warning == "`target_return=1` ends no run without evaluations."
    assert in_flags(warning) == "--target-return 1 ends no run without evaluations."


def test_names_without_a_part_are_fields():
    """Of what a user configures, or of what sweeps, exports and plans."""
    fields = {x.name for kind in (Experiment, Hosts, Tournament) for x in dataclasses.fields(kind)}
    assert set(FIELD_NAMES) - fields == {"attach", "draws", "format", "prices", "track", "weights"}
