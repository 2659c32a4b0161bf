"""
One collector per kind of garbage; still empty. Import it as ``millpond.gc``.
"""
