"""Weights & Biases: the tracking process, and the conversion of offline runs. Imports no torch."""
