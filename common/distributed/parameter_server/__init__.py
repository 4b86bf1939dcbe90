"""Parameter server: the ranks that serve parameters, the ranks that compute gradients, and their report."""
