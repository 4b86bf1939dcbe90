"""Training cases that parity tests compare with a reference."""
