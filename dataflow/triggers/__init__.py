"""Triggers: when a window shows its contents."""
