"""Models of random weights in real shapes, and pairs with a known acceptance rate, for speed measurements and tests."""
