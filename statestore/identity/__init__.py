"""
Identity: which store this is, where it lies, and what to do when it is not the one it was.
"""
