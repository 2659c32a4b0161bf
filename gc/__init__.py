"""
One collector per kind of garbage, behind horizons and through the fence. Import it as ``millpond.gc``.
"""
