"""What the project measures of itself, and of what it could have been instead."""
