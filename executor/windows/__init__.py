"""Windows, triggers, combiners and panes; windowed steps are computations."""
