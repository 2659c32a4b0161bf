"""Dead letters: rows of what user code could not process, how many there may be, and how they are given once more."""
