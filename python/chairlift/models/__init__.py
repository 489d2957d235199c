"""Models: their configuration, their weights, and the decoder that runs them."""
