"""Elastic runs whose ranks are killed or stopped."""
