"""The list of experiments, and what tests need to know about each."""
