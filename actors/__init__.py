"""Memory, weights, engine and their composition: everything that would stay under another front than Ray Serve."""
