"""Nexmark on Millpond: the auction-site queries with which streaming engines are measured.

``python -m examples.nexmark`` runs them; the modules ``…_queries`` are the part to read.
"""
