"""Checkpoints, packed images and modules whose tensors are views of an arena."""
