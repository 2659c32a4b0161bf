"""Windows, triggers and panes on top of the executor: each windowed step is a computation."""
