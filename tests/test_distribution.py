"""
Distribution of tests over processes.
"""

from tests.distribution import group_of
from tests.tidy import ROOT

ORACLE = "tests/property/test_window_oracle.py"


def test_shares_of_a_test_go_to_any_process_though_their_module_has_a_test_on_spark():
    """
    A share is a group of its own, and every other test of the module is in the group of Spark.
    """
    shares = [f"{ORACLE}::test_it[share {number}]" for number in range(2)]

    assert [group_of(ROOT, share) for share in shares] == shares
    assert group_of(ROOT, f"{ORACLE}::test_it") == "spark"


def test_all_users_of_the_shared_session_are_in_one_group(request):
    """
    Else a second process starts a session of its own, and nothing but time tells.
    """
    users = {item.nodeid for item in request.session.items if "spark" in getattr(item, "fixturenames", ())}

    assert {group_of(ROOT, user) for user in users} <= {"spark"}
    assert group_of(ROOT, "tests/conformance/test_table_readers.py::test_with_spark") == "spark"
