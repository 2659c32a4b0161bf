"""Alarm after an hour of silence, over ten real series: a timer that each record postpones."""
