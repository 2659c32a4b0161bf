"""Delta's log: actions, checkpoints, snapshots, and the writer of versions."""
