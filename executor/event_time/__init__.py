"""Instants, durations, clocks of event time, and how late data may be."""
