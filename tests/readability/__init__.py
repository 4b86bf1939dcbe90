"""Lint step of the project: measures how readable the product code and its messages are, and names what to improve."""
