"""
Taking a damaged store back to its newest sound version.
"""
