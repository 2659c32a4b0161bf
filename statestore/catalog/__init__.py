"""
The catalog: topology and history for tools, in any SQL database.
"""
