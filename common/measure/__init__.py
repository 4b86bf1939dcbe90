"""Measurement and logging of training steps: time, memory, metrics, profiles, plots and tables."""
