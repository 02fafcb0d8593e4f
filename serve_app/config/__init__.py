"""What the YAML files may say."""
