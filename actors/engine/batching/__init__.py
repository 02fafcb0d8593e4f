"""Everything that touches transformers' continuous batching."""
