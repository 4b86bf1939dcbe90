"""Parameter server: server ranks, worker ranks, their training state, and the report."""
