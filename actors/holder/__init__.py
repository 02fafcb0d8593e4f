"""Who keeps the packed images of a node: made, held, found, copied, sent to disk."""
