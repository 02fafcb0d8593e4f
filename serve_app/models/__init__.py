"""Models as the front sees them."""
