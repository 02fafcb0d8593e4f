"""The command `sleepserve`."""
