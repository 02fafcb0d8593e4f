"""OpenAI's Responses, without a store: requests, answers."""
