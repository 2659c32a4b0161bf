"""How outside rows become records: payloads, keys, times, changes and positions."""
