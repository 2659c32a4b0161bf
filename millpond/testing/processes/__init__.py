"""Real processes under faults: workers, standbys, owners, their ledger, and scenarios that kill them."""
