"""A pipeline in streaming queries of the user's own: their ``foreachBatch`` functions, and the run that these share."""
