"""What the runs of both runners have in common: options, life cycle, watermarks and the end."""
