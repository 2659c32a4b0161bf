"""Load reports, and the splits and merges that they call for."""
