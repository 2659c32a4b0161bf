"""Windows and the functions that assign and merge them."""
