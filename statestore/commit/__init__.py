"""The fenced commit: the rules that it must satisfy, and how it lands exactly once."""
