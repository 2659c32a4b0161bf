"""The catalog: readers' horizons and code versions, in a small SQL database."""
