"""Report on mixed precision and gradient accumulation."""
