"""Triton's interpreter without what it does over and over: kernels give the same in less than half the time."""

from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def spare_repetitions() -> None:
    """Of the version that `pyproject.toml` names for a CPU; any other stays as it is."""
    try:
        if not version("triton").startswith("3.7."):
            return
    except PackageNotFoundError:
        return
    from triton.language import core
    from triton.runtime import interpreter

    # It looks through all of the language at each call of a function by a kernel, such as `tl.sum`, to put its
    # own in place of what compiles. Once for each function is enough if nobody takes it back in between.
    substitute: Any = interpreter._patch_lang

    @cache
    def substitute_once(function: Any) -> Any:
        substitute(function)
        return interpreter._LangPatchScope()  # has nothing to take back

    interpreter._patch_lang = substitute_once
    # It computes integers twice, once in 64 bits, for an assertion that it leaves out unless `debug` is on.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    # It makes a table of all types for each look at it.
    of_type: Any = interpreter._get_np_dtype
    of_scalar = cache(of_type)

    def of_any(dtype: Any) -> Any:
        scalar = dtype.scalar
        return of_type(scalar) if scalar.is_ptr() else of_scalar(scalar)  # pointers have no hash

    interpreter._get_np_dtype = of_any

    # Each result has a type of its own, with a shape that is checked and wrapped anew. Those of equal shapes share it.
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    make_type: Any = core.block_type.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if sizes not in shapes:
            make_type(self, element_ty, shape)  # or it refuses
            wrapped = core.tuple([core.constexpr(size) for size in sizes])
            shapes[sizes] = {
                "shape": self.shape,
                "numel": self.numel,
                "wrapped": wrapped,
                "said": str(self.shape),
            }
        self.__dict__.update(shapes[sizes])
        self.element_ty = element_ty
        self.name = f"<{self.said}, {element_ty}>"

    nothing, one = core.tuple([]), core.constexpr(1)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type.wrapped, core.constexpr(type.numel)
        else:
            self.shape, self.numel = nothing, one

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
