"""Anthropic's JSON to and from `actors.protocol`; what is the same as in OpenAI's chats is `serve_app.openai`'s."""
