"""How elements become a result: exact combiners and sketches."""
