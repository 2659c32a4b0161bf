"""
Whether a store is sound, and what a damaged one can still tell.
"""
