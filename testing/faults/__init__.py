"""
Faults: damaged stores, failing object stores, failing code, scenarios and their report.
"""
