"""The right to write: leases, fences, retries, and what a new owner reads first."""
