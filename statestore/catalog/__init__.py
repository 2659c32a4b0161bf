"""The catalog: topology, history and horizons for tools and garbage collection, in any SQL database."""
