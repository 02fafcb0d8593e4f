"""What crosses Serve beside requests: the state of replicas, the holds of operators."""
