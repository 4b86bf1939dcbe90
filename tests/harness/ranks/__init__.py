"""Programs whose ranks tests start and observe."""
