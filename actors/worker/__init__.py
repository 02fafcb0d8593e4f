"""One model in one process: memory and engine, brought to the device and taken from it."""
