"""The generation loop, sampling, and attention over pages."""
