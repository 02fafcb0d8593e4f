"""The replica's deployment, and the weight holders it finds."""
