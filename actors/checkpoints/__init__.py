"""Where checkpoints come from."""
