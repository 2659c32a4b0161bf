"""Distribution of tests over processes."""

from tests.distribution import SPARK, group_of, scope_of
from tests.tidy import ROOT

ORACLE = "tests/property/test_window_oracle.py"
TIME = "tests/conformance/test_time.py"
LETTERS = "tests/conformance/test_dead_letters.py"
WINDOWS = "tests/conformance/test_bounded_windows.py"


def test_shares_of_a_test_go_to_any_process():
    """A share is a group of its own."""
    shares = [f"{ORACLE}::test_it[share {number}]" for number in range(2)]

    assert [group_of(ROOT, share) for share in shares] == shares


def test_all_users_of_the_shared_session_are_in_one_group(request):
    """Else a second process starts a session of its own, which the session's fixture refuses."""
    users = {item.nodeid for item in request.session.items if "spark" in getattr(item, "fixturenames", ())}

    assert {group_of(ROOT, user) for user in users} <= {SPARK}
    assert group_of(ROOT, "tests/conformance/test_table_readers.py::test_with_spark") == SPARK


def test_two_processes_of_three_share_the_users_by_module():
    """With fewer processes one has them all; tests without Spark stay as they are."""
    modules = [f"tests/test_{number}.py" for number in range(20)]

    assert {scope_of(SPARK, f"{module}::test_it", 2) for module in modules} == {SPARK}
    assert {scope_of(SPARK, f"{module}::test_it", 3) for module in modules} == {"spark 0", "spark 1"}
    for module in modules:
        assert scope_of(SPARK, f"{module}::test_it", 3) == scope_of(
            SPARK, f"{module}::TestOther::test_it[a]", 3
        )
    assert scope_of(TIME, f"{TIME}::test_it", 3) == TIME


def test_users_are_found_however_they_ask_for_the_session():
    """By an argument, by a fixture of the class or the module, or by name in those cases that are named after Spark."""
    by_class = (f"{TIME}::TestSpark::test_it", f"{TIME}::TestLocalRunner::test_it")
    by_fixture = (f"{LETTERS}::test_what_a_letter_has[{play}]" for play in ("SparkPlay", "LocalPlay"))
    by_name = (
        f"{WINDOWS}::test_bounded_input_gives_the_final_panes[{runner}]" for runner in ("spark", "local")
    )

    assert [group_of(ROOT, test) for test in by_class] == [SPARK, TIME]
    assert [group_of(ROOT, test) for test in by_fixture] == [SPARK, LETTERS]
    assert [group_of(ROOT, test) for test in by_name] == [SPARK, WINDOWS]


def test_tests_without_the_session_are_free_though_their_module_has_one_with_it():
    """They go where there is room: most modules with a test on Spark have more without."""
    assert group_of(ROOT, "tests/conformance/test_table_readers.py::test_without_spark") != SPARK
    assert group_of(ROOT, f"{ORACLE}::test_it") == ORACLE


def test_what_takes_long_begins_first(request):
    """Else one process has a long group left when the others have ended."""
    ranks = [
        0
        if group_of(ROOT, item.nodeid) == SPARK
        else 1 + (not any(map(item.get_closest_marker, ("fault", "slow"))))
        for item in request.session.items
    ]

    assert ranks == sorted(ranks)
