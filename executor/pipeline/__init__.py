"""What the user describes: streams, computations and how they connect; the checked topology."""
