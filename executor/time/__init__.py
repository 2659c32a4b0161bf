"""Instants and durations, clocks of event time, and watermark policies."""
