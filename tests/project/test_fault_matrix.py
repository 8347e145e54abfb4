"""The fault matrix counts what tests did, and the page shows the record."""

import json

import fault_matrix
import pytest

TESTS = """
    import pytest

    @pytest.mark.figure(1)
    def test_one_case():
        pass

    @pytest.mark.figure(1, 3)
    @pytest.mark.parametrize("worst", [3, 9])
    def test_many_cases(worst, cases):
        cases.note("p99 5 ms")
        for number in cases(range(5)):
            assert number < worst

    @pytest.mark.figure(2)
    def test_a_failure_is_a_case():
        assert False

    @pytest.mark.figure(5, 6)
    def test_counts_of_two_figures_and_a_failure_beside_them(cases):
        cases.add(7, 7, 5)
        cases.add(8, 9, 6)
        cases.add(2, 2)
        assert False

    @pytest.mark.figure(7)
    def test_a_failure_after_the_last_case(cases):
        for number in cases(range(5)):
            pass
        assert False

    @pytest.mark.figure(4)
    def test_no_case_is_counted_where_a_test_is_left_out():
        pytest.skip("needs something")

    def test_of_no_figure(cases):
        assert list(cases("ab")) == ["a", "b"]
"""


def test_cases_are_counted_also_of_tests_that_fail(pytester):
    pytester.makepyfile(TESTS)
    plugin = ("-p", "fault_matrix", "-p", "no:cacheprovider")
    result = pytester.runpytest(*plugin, "-n", "0", "--fault-matrix", "matrix.json")
    result.assert_outcomes(passed=3, failed=4, skipped=1)
    record = json.loads((pytester.path / "matrix.json").read_text())
    counts = {n: (row["passed"], row["total"]) for n, row in record["figures"].items()}
    assert counts["1"] == (1 + 3 + 5, 1 + 5 + 5)
    assert counts["2"] == (0, 1)
    assert counts["3"] == (3 + 5, 5 + 5)
    assert (counts["5"], counts["6"], counts["7"]) == ((9, 9), (10, 11), (5, 6))
    assert record["figures"]["3"]["notes"] == ["p99 5 ms"]
    lines = fault_matrix.table(record).splitlines()
    assert "| 9/11, **1 failed** | p99 5 ms |" in lines[2]
    assert lines[2].endswith(f", {record['runs'][0]['date']} |")  # a row's age
    assert lines[5].endswith("| not run |  |  |")
    assert set(lines) <= set(result.outlines)


def test_each_figure_is_of_the_record_with_the_most_cases(pytester):
    pytester.makepyfile(TESTS)
    options = ("-p", "fault_matrix", "-p", "no:cacheprovider", "-n", "0", "--fault-matrix")
    pytester.runpytest(*options, "all.json")
    result = pytester.runpytest(*options, "some.json", "--figures", "3,4", "-k", "9 or left_out")
    result.assert_outcomes(passed=1, skipped=1, deselected=6)
    records = [json.loads((pytester.path / f"{name}.json").read_text()) for name in ("all", "some")]
    for pair in (records, records[::-1]):
        record = fault_matrix.merged(pair)
        counts = {n: (row["passed"], row["total"]) for n, row in record["figures"].items()}
        assert (counts["1"], counts["2"], counts["3"]) == ((9, 11), (0, 1), (8, 10))
        assert [len(run["commands"]) for run in record["runs"]] == [2]
    records[1]["runs"][0]["machine"] = "another"
    runs = fault_matrix.merged(records)["runs"]
    assert [(len(run["commands"]), run["machine"] == "another") for run in runs] == [
        (1, False),
        (1, True),
    ]


def test_runs_none_of_whose_figures_are_shown_are_left_out():
    def record(commit, total):
        rows = {str(n): {"total": total, "commit": commit} for n in (1, 2)}
        run = {"date": "", "machine": commit, "versions": {}}
        return {"runs": [{**run, "commits": [commit], "commands": [commit]}], "figures": rows}

    old, new = record("old", 5), record("new", 7)
    assert fault_matrix.merged([old, new]) == new
    old["figures"]["2"]["total"] = 9
    assert [run["machine"] for run in fault_matrix.merged([old, new])["runs"]] == ["old", "new"]


def test_an_unknown_figure_is_refused(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.figure(99)\ndef test(): pass")
    result = pytester.runpytest("-p", "fault_matrix", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_the_page_shows_the_record():
    record = json.loads(fault_matrix.RECORD.read_text())
    page = fault_matrix.PAGE.read_text()
    assert page == fault_matrix.with_table(page, record)
