"""What runs in Spark's Python workers: tasks, their plans, the rows routed to them, and what a worker keeps."""
