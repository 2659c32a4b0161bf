"""What runs: computations, pipelines, time, soft state, and the two runners."""
