"""Alarm after an hour of silence, over ten real series: what a timer that each record moves on finds."""
