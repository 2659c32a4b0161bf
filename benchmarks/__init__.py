"""
What Millpond costs, measured; run them from the root of the repository.
"""
