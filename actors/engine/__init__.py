"""Continuous batching, sampling, attention and text."""
