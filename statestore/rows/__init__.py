"""
Rows and the files that they are in: format, merge, checksums, codecs, Bloom filters.
"""
