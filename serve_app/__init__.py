"""HTTP and Ray Serve: the front of sleepserve."""

__version__ = "0.1.0"
