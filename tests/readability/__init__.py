"""Lint step that measures the readability of product code and its messages, and suggests improvements."""
