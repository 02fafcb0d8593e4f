"""Every endpoint, described once, and what is made of the descriptions."""
