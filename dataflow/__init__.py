"""
Windows, triggers and panes, on top of the executor; still empty.
"""
