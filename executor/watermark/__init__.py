"""The low watermark of each computation, from injectors, pending work and holds."""
