"""HTTP and Ray Serve: the front of sleepserve; for scripts, `LLM` and `SamplingParams`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.llm import LLM, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Only who asks for them pays for their imports: every process of the project imports this package."""
    if name not in ("LLM", "SamplingParams"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from serve_app import llm

    return getattr(llm, name)
