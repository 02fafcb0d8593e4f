"""The application `weights`: the holders of images, and how others find them."""
