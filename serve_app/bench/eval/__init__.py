"""A model before and after a sleep: tokens, perplexity, memory, times."""
