"""
Windows, triggers and panes, on top of the executor: windowed steps are computations.
"""
