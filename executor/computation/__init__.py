"""What user code sees: a computation, its context, state, timers and productions."""
