"""A model's modules: which are served, and how they attend."""
