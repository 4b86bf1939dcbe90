"""Local SGD: workers, exchange of parameters, compression and state."""
