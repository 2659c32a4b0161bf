"""The simulator: the whole engine in one thread, from one seed, with faults (harness H3)."""
