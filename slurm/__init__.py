"""Launching and scheduling runs, reports on them, and the local cluster."""
