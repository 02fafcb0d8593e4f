"""Which token comes next."""
