"""Errors and warnings speak of fields; the command line says the same of flags."""

import pytest

from podracer.cli.sentences import in_flags


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
