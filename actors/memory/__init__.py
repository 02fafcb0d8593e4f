"""Physical memory behind stable addresses."""
