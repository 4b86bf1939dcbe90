"""Runs and run folders: long, resumed, tracked, damaged and synthetic ones."""
