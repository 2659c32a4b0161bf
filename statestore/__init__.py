"""Durable state: rows, the log and its single commit path, snapshots, leases, the catalog, views."""
