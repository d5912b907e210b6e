"""A model made on the spot, and the demo run on it."""
