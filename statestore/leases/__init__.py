"""Leases on intervals: their sequencers fence every write."""
