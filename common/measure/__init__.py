"""What a step costs: timing, memory, profile, plots and tables."""
