"""The right to write: leases, fences, retries, and the scan of a new owner."""
