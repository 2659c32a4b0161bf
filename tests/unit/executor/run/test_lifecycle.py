"""The life cycle of a run."""

from __future__ import annotations

import pytest

from millpond.executor.run.lifecycle import Lifecycle, Phase
from millpond.statestore.errors import InternalError, InvalidError, UnavailableError


def test_stop_succeeds_once_and_wakes_waiting_threads() -> None:
    lifecycle = Lifecycle()
    assert not lifecycle.wait_for_stop(0)

    assert [lifecycle.stop(), lifecycle.stop()] == [True, False]
    assert lifecycle.wait_for_stop(0)
    assert lifecycle.phase is Phase.STOPPING
    assert not lifecycle.is_active


def test_first_error_is_kept() -> None:
    """A later error may still mark user code as hanging."""
    lifecycle = Lifecycle()
    first = UnavailableError("away")
    lifecycle.fail(first)
    lifecycle.fail(InvalidError("hangs"), is_stranded=True)

    assert lifecycle.error is first
    assert lifecycle.is_stranded
    assert not lifecycle.is_active
    with pytest.raises(UnavailableError):
        lifecycle.raise_failure()


def test_failure_is_raised_before_the_phase_is_checked() -> None:
    """A run that failed and was then stopped raises its error."""
    lifecycle = Lifecycle()
    lifecycle.check_phase(Phase.RUNNING)
    lifecycle.stop()
    lifecycle.check_phase(Phase.RUNNING, Phase.STOPPING)
    with pytest.raises(InvalidError, match="has been stopped"):
        lifecycle.check_phase(Phase.RUNNING)

    lifecycle.fail(UnavailableError("away"))
    with pytest.raises(UnavailableError):
        lifecycle.check_phase(Phase.RUNNING)


def test_closing_an_active_or_closed_run_is_an_internal_error() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(InternalError, match="stopped before it is closed"):
        lifecycle.close()
    lifecycle.stop()
    lifecycle.close()

    assert lifecycle.phase is Phase.STOPPED
    with pytest.raises(InternalError, match="stopped before it is closed"):
        lifecycle.close()
