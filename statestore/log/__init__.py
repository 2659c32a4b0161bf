"""
Delta's log: actions, checkpoints, snapshots, and how a version is written.
"""
