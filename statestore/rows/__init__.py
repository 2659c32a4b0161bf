"""Rows and row files: format, merge, checksums, codecs, Bloom filters."""
