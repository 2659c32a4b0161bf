"""
Leases on intervals, whose sequencers fence every write.
"""
