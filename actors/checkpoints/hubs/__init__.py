"""The hubs that checkpoints are downloaded from."""
