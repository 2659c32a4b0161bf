"""Time, windows and triggers, tested by transcripts in YAML."""
