"""What the commands share: opening stores, tables, progress and help."""
