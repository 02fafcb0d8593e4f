"""HTTP and Ray Serve: the front of sleepserve."""
