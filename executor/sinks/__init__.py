"""How streams leave, exactly once: Delta tables that are appended to or kept up to date."""
