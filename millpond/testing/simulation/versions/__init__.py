"""What operators do with the versions of a simulated store: savepoints, forks and rewinds."""
