"""Programs that verify a checkout, and a clone without a technique."""
