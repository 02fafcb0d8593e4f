"""The most that numbers of the configuration may be, where nothing else limits them."""

MAX_COUNT = 2**31 - 1  # Ray Serve keeps numbers of replicas and requests in 32 bits
MAX_BYTES = 2**40
MAX_SECONDS = 1e9  # thirty years: longer than a server runs, and no clock overflows
