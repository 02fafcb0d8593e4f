"""Prompts to token ids, and token ids to what clients read."""
