"""The life cycle of a run: its phases, and its first failure."""

from __future__ import annotations

import pytest

from millpond.executor.run.lifecycle import Lifecycle, Phase
from millpond.statestore.errors import InternalError, InvalidError, UnavailableError


def test_a_run_is_stopped_once() -> None:
    """Only the first call of stop begins to stop the run, and wakes threads that wait for it."""
    lifecycle = Lifecycle()
    assert not lifecycle.wait_for_stop(0)

    assert [lifecycle.stop(), lifecycle.stop()] == [True, False]
    assert lifecycle.wait_for_stop(0)
    assert lifecycle.phase is Phase.STOPPING
    assert not lifecycle.is_active


def test_the_first_error_is_kept() -> None:
    """Later errors change nothing except that user code may be found to hang."""
    lifecycle = Lifecycle()
    first = UnavailableError("away")
    lifecycle.fail(first)
    lifecycle.fail(InvalidError("hangs"), is_stranded=True)

    assert lifecycle.error is first
    assert lifecycle.is_stranded
    assert not lifecycle.is_active
    with pytest.raises(UnavailableError):
        lifecycle.raise_failure()


def test_what_ended_a_run_is_raised() -> None:
    """A failure comes before the phase: a run that failed and was stopped raises its error."""
    lifecycle = Lifecycle()
    lifecycle.check_phase(Phase.RUNNING)
    lifecycle.stop()
    lifecycle.check_phase(Phase.RUNNING, Phase.STOPPING)
    with pytest.raises(InvalidError, match="has been stopped"):
        lifecycle.check_phase(Phase.RUNNING)

    lifecycle.fail(UnavailableError("away"))
    with pytest.raises(UnavailableError):
        lifecycle.check_phase(Phase.RUNNING)


def test_a_run_is_stopped_before_it_is_closed() -> None:
    """To close a run that still takes input, or to close it twice, is an error of the engine."""
    lifecycle = Lifecycle()
    with pytest.raises(InternalError, match="stopped before it is closed"):
        lifecycle.close()
    lifecycle.stop()
    lifecycle.close()

    assert lifecycle.phase is Phase.STOPPED
    with pytest.raises(InternalError, match="stopped before it is closed"):
        lifecycle.close()
