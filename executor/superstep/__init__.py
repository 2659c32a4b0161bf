"""One round over all intervals with work, and its one commit."""
