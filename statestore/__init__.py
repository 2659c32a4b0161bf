"""
What is durable: rows, the log and its one commit, snapshots, leases, the catalog, views.
"""
