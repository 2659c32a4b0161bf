"""One interval under one commit: its bundle, its soft state and its worker."""
