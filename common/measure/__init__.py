"""Measurement of training steps: timing, memory and profiles, and the plots and tables that show the results."""
