"""Packed images of weights: made, kept, found, attached and checked."""
