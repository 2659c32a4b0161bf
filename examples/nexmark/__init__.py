"""
Nexmark: the queries on an auction site that streaming engines are measured with, on Millpond.

``python -m examples.nexmark`` runs them; the modules ``…_queries`` are the part to read.
"""
