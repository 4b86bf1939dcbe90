"""Networks, partition into stages, pruning, the trained model's file and its exports."""
