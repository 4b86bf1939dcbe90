"""One package per technique. Nothing outside this package and the experiments imports a technique."""
