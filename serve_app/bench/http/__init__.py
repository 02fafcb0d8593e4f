"""Load on any OpenAI-compatible server: what is sent, by whom, what came back, in figures."""
