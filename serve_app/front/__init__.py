"""The ASGI application: routes, checks and answers."""
