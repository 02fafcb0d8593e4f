"""How many replicas there are."""
