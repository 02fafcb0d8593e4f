"""Anthropic's error object. Types of errors follow from the status (platform.claude.com/docs/en/api/errors)."""

from collections.abc import Mapping

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",  # Anthropic's own status for it is 529; clients try again after both
}
_OTHER = "invalid_request_error"
TYPES = sorted({*_TYPES.values(), _OTHER})


def error_body(status: int, message: str) -> dict[str, object]:
    """As a response, and as an event of a stream."""
    kind = _TYPES.get(status, _OTHER)
    return {"type": "error", "error": {"type": kind, "message": message}}
