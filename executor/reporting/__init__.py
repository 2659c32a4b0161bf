"""What a run shows while it works, and says at its end."""
