"""Distribution of tests over processes."""

from types import SimpleNamespace

import pytest
from xdist.remote import Producer

from tests.distribution import LONGEST, SPARK, Distribution, group_of, rank_of, scope_of
from tests.tidy import ROOT

ORACLE = "tests/property/test_window_oracle.py"
TIME = "tests/conformance/test_time.py"
LETTERS = "tests/conformance/test_dead_letters.py"
WINDOWS = "tests/conformance/test_bounded_windows.py"


def test_shares_of_a_test_go_to_any_process():
    shares = [f"{ORACLE}::test_it[share {number}]" for number in range(2)]

    assert [group_of(ROOT, share) for share in shares] == shares


def test_users_of_the_shared_session_are_in_one_group(request):
    """Otherwise a second process starts a session, which the session's fixture refuses."""
    users = {item.nodeid for item in request.session.items if "spark" in getattr(item, "fixturenames", ())}

    assert {group_of(ROOT, user) for user in users} <= {SPARK}
    assert (
        group_of(
            ROOT, "tests/conformance/test_table_readers.py::test_readers_with_spark_agree_at_every_version"
        )
        == SPARK
    )


def test_users_of_a_module_stay_together():
    assert (
        scope_of(SPARK, f"{TIME}::TestSpark::test_it[a]")
        == scope_of(SPARK, f"{TIME}::test_it")
        == f"{SPARK} {TIME}"
    )
    assert scope_of(TIME, f"{TIME}::test_it") == TIME


class Process:
    """A process of tests that collects its tests and runs none."""

    def __init__(self, number) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.given = []
        self.shutting_down = False

    def send_runtest_some(self, indices):
        self.given += indices

    def shutdown(self):
        self.shutting_down = True


@pytest.mark.parametrize(("processes", "sessions"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_few_processes_have_a_session(processes, sessions):
    """They take its users first, and no other process gets the remaining users."""
    users = [f"{TIME}::TestSpark::test_{number}" for number in range(3)]
    users += [
        f"tests/conformance/test_{name}.py::TestSpark::test_it" for name in ("cycles", "changes", "evolution")
    ]
    users = [user for user in users if group_of(ROOT, user) == SPARK]
    others = [
        f"{module}::test_it"
        for module in (TIME, LETTERS, WINDOWS, "tests/test_docs.py", "tests/test_site.py")
    ]
    tests = [*others, *users]
    config = SimpleNamespace(
        rootpath=ROOT, getvalue=lambda _: ["popen"] * processes, option=SimpleNamespace()
    )
    config.option.loadscopereorder = False
    schedule = Distribution(config, Producer("test"))
    nodes = [Process(number) for number in range(processes)]
    for node in nodes:
        schedule.add_node(node)
        schedule.add_node_collection(node, tests)
    schedule.schedule()
    done = [0] * processes
    while schedule.has_pending:
        for number, node in enumerate(nodes):
            for index in node.given[done[number] :]:
                done[number] += 1
                schedule.mark_test_complete(node, index)

    assert len(users) >= 4
    assert sorted(index for node in nodes for index in node.given) == list(range(len(tests)))
    with_session = [node for node in nodes if any(tests[index] in users for index in node.given)]
    assert len(with_session) == sessions
    assert all(tests[node.given[0]] in users for node in with_session)


def test_users_are_found_however_they_request_the_session():
    """By argument, by a fixture of class or module, or by a case named after Spark."""
    by_class = (f"{TIME}::TestSpark::test_it", f"{TIME}::TestLocalRunner::test_it")
    by_fixture = (
        f"{LETTERS}::test_letter_has_id_time_attempt_and_typed_value[{play}]"
        for play in ("SparkPlay", "LocalPlay")
    )
    by_name = (
        f"{WINDOWS}::test_bounded_input_gives_the_final_panes[{runner}]" for runner in ("spark", "local")
    )

    assert [group_of(ROOT, test) for test in by_class] == [SPARK, TIME]
    assert [group_of(ROOT, test) for test in by_fixture] == [SPARK, LETTERS]
    assert [group_of(ROOT, test) for test in by_name] == [SPARK, WINDOWS]


def test_tests_without_the_session_are_free_despite_their_module():
    """Most modules with a test on Spark have more tests without it."""
    assert (
        group_of(
            ROOT, "tests/conformance/test_table_readers.py::test_readers_without_spark_agree_at_every_version"
        )
        != SPARK
    )
    assert group_of(ROOT, f"{ORACLE}::test_it") == ORACLE


def test_longest_groups_begin_first(request):
    """Otherwise one process has a long group left when the others have ended."""
    ranks = list(map(rank_of, request.session.items))

    assert ranks == sorted(ranks)


def test_modules_that_take_long_exist():
    assert [module for module in LONGEST if not (ROOT / module).exists()] == []
