"""The status page at `/`: what it shows, how it is told, and its static files."""
