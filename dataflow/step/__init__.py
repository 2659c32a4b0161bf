"""A windowed step: strategy, the windows of a key, their timers, their panes."""
