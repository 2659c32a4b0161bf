"""Identity: which store this is, where it is, and what to do when it was moved, copied or restored."""
