"""
Real processes for tests: workers, standbys, owners, and the ledger that they keep.
"""
