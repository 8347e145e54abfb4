"""Pages that are made from the code are current, and their commands are the recipes."""

import importlib.util
import json

import fault_matrix
from pages import ROOT

from podracer.envs.catalog import ADAPTERS, ENVIRONMENTS

spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def test_the_page_of_the_packages_is_current():
    page = (ROOT / "docs" / "api" / "packages.md").read_text()
    assert page == tables.packages(), "run docs/tables.py"


def test_the_names_of_packages_are_current():
    assert tables.NAMES.read_text() == tables.names_of_packages(), "run docs/tables.py"


def test_every_environment_is_in_the_page_of_the_site():
    page = tables.environments()
    for name in [*ENVIRONMENTS, *(f"{prefix}:NAME" for prefix in ADAPTERS)]:
        assert page.count(f"\n| `{name}` |") == 2  # where it runs, what it is


def test_every_extra_of_an_environment_has_its_size():
    assert tables.MEGABYTES.keys() == {x.extra for x in ADAPTERS.values() if x.extra}


def test_the_page_of_reliability_shows_the_record_of_the_fault_matrix():
    record = json.loads(fault_matrix.RECORD.read_text())
    page = fault_matrix.PAGE.read_text()
    assert page == fault_matrix.with_table(page, record)
