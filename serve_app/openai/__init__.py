"""OpenAI's JSON to and from `actors.protocol`."""
