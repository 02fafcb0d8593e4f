"""What a replica decides and keeps of its requests."""
