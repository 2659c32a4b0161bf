"""
The fenced commit: what it must satisfy, and how it lands once.
"""
