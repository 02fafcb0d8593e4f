"""Many models on one card, under a trace of requests."""
