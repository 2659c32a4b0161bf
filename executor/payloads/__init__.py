"""Payloads: a column of a stream's rows that holds encoded values, and how records get them decoded."""
