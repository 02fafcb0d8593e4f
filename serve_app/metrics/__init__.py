"""What is counted, and where it goes."""
