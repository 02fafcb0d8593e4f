"""Weights of 4 or 8 bits: the files' formats, the one layout they are read into, and what computes with it."""
