"""Mixed precision and gradient accumulation: the report."""
