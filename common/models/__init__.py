"""Networks, their partition into stages, pruning, and the files and exports of trained models."""
