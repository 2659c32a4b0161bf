"""Sales of a shop: decimals, dates and times through windows, a join, changes, upserts and SQL."""
