"""What a process of ours sets up for itself: logs and heap."""
