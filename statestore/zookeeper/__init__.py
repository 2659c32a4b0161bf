"""Leases and high-water marks in ZooKeeper, and an embedded server."""
