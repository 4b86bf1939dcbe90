"""Local SGD: workers, exchange of parameters, compression, and training state."""
