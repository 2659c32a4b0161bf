"""Jobs that show Millpond at work; run them from the root of the repository."""
