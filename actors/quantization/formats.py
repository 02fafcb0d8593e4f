"""The formats of quantised checkpoints: what a configuration and the tensors' names and shapes say. No torch.

What is quantised is told by the files: a projection whose tensors have the names of a format. The
configuration says what they mean, and is refused where it asks for what is not served right.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from actors.quantization.scheme import Kind, Scheme
from actors.rounding import cdiv

# The recipes by which checkpoints are made to try and test with (making.py).
QuantizeName = Literal[
    "gptq-4-128",
    "gptq-4-128-order",
    "gptq-4-channel",
    "gptq-4-32-asym",
    "gptq-v2-4-32-asym",
    "gptq-8-128",
    "awq-4-128",
    "ct-w4a16",
    "ct-w4a16-asym",
    "ct-w4a16-order",
    "ct-w8a16",
    "ct-int8",
    "ct-fp8",
    "ct-fp8-static",
    "fp8-block",
    "fp8-tensor",
]
QUANTIZE_NAMES: tuple[QuantizeName, ...] = get_args(QuantizeName)

# How a projection's values are stored.
#   gptq, gptq_v2  qweight int32 [K*bits/32, N], qzeros int32 [groups, N*bits/32], scales [groups, N], g_idx int32 [K]:
#                  the first of a word's values in its lowest bits; gptq stores zero points minus one
#   awq            qweight int32 [K, N/8], qzeros int32 [groups, N/8], scales [groups, N]: columns of a word interleaved
#   packed         weight_packed int32 [N, K*bits/32], weight_scale [N, groups], weight_zero_point int32
#                  [N*bits/32, groups], weight_g_idx int32 [K]: signed values with half the range added
#   plain          weight int8 or float8_e4m3fn [N, K], with scales beside it
Packing = Literal["gptq", "gptq_v2", "awq", "packed", "plain"]

# What some files have beside the weights: scales of activations, which stay in the model's type here, and of
# keys and values, which the cache holds in the model's type.
IGNORED = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "activation_scale",
    "activation_scale_inv",
    "act_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
)

_LEAST_GROUP = 32
_SCALE_TYPES = ("F16", "BF16", "F32")

# What values of another type, or out of all bounds, lead to in a configuration that somebody else wrote.
_MISTAKES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_LONGEST_PATTERN = 4096
# Characters that patterns may have once what they say to count is written out: `regex` does that.
_COUNTED = 2**20
_PATTERNS_S = 2.0  # for all the slow matches of one configuration
_SLOW_S = 0.001  # usual ones take microseconds


class Unserved(ValueError):
    """A format, or a combination, that is not served right; its text says which."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """As a safetensors header has it."""

    dtype: str  # as there: "I32", "F8_E4M3"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Projection:
    """A quantised projection of K input and N output channels, as the files have it.

    Attributes:
        name: that all its tensors' names begin with.
        tensors: the last parts of their names.
        quantised_inputs: it was made for inputs that are quantised to FP8, too.
    """

    name: str
    K: int
    N: int
    scheme: Scheme
    packing: Packing
    tensors: tuple[str, ...]
    quantised_inputs: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.scheme.kind == "int4" else 8


@dataclass(frozen=True, slots=True)
class Format:
    """What a quantisation config says.

    Attributes:
        method: its `quant_method`.
        name: in words, for an image's key and for logs: "gptq-int4-128".
        marks: the last part of the name of a projection's values, of which each has one.
        describe: what a projection of these tensors is, by the last parts of their names.
        file: that says it.
    """

    method: str
    name: str
    marks: tuple[str, ...]
    describe: Callable[[str, Mapping[str, StoredTensor]], Projection]
    file: str = "config.json"

    def projections(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Projection]:
        """The quantised projections among a checkpoint's tensors, by name.

        Raises:
            Unserved: one of them is not served right, or there is none.
        """
        by_module: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in tensors.items():
            module, _, leaf = name.rpartition(".")
            by_module.setdefault(module, {})[leaf] = tensor
        found = {}
        for module, parts in by_module.items():
            if not any(_is_quantised(parts.get(mark)) for mark in self.marks):
                if any(leaf in parts for leaf in ("qweight", "weight_packed", "weight_scale_inv")):
                    raise Unserved(f"{module} has tensors of another format")
                continue
            try:
                found[module] = self.describe(module, parts)
            except Unserved:
                raise
            except _MISTAKES as exc:
                raise Unserved(f"for {module}, {_not_understood(exc)}") from exc
        if not found:
            raise Unserved("no weight of the files is, in that format")
        return found


def _is_quantised(tensor: StoredTensor | None) -> bool:
    return tensor is not None and tensor.dtype in ("I32", "I8", "F8_E4M3")


def read_format(config: object) -> Format:
    """The format of a `quantization_config`.

    Raises:
        Unserved: it is not served.
    """
    if not isinstance(config, dict):
        raise Unserved("not supported: the quantisation config is no object")
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        raise Unserved(_UNSERVED["bitsandbytes"])
    method = str(config.get("quant_method", "")).lower()
    if method not in _READERS:
        raise Unserved(_UNSERVED.get(method, f"not supported: {', '.join(_READERS)} are"))
    try:
        return _READERS[method](config)
    except Unserved:
        raise
    except _MISTAKES as exc:
        raise Unserved(_not_understood(exc)) from exc


def _not_understood(exc: Exception) -> str:
    return f"not understood ({type(exc).__name__}: {' '.join(str(exc).split())[:120]})"


class _Patterns:
    """Patterns of modules' names, of a configuration that somebody else wrote: some would take for ever to match."""

    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}
        self._left_s = _PATTERNS_S
        self._left = _COUNTED

    def add(self, pattern: str) -> None:
        """Raises Unserved for what is no pattern."""
        # Unlike `re`, it gives up a match in time. transformers brings it; most checkpoints have no patterns.
        import regex  # type: ignore[import-untyped]

        if len(pattern) > _LONGEST_PATTERN:
            raise Unserved(f"a pattern of {len(pattern)} characters; {_LONGEST_PATTERN} are read")
        counts = [int(each) for each in re.findall(r"\d+(?=[,}])", pattern)]
        if counts:
            self._left -= len(pattern) * math.prod(max(count, 1) for count in counts)
        if self._left < 0:
            raise Unserved(f"the pattern {pattern[:60]!r} counts too far")
        try:
            self._compiled[pattern] = regex.compile(pattern)
        except regex.error as exc:
            raise Unserved(_not_understood(exc)) from exc

    def match(self, pattern: str, name: str) -> bool:
        """Whether it fits the beginning of a name, of those added; raises Unserved if that takes too long."""
        started_s = time.perf_counter()
        try:
            found = self._compiled[pattern].match(name, timeout=max(self._left_s, _SLOW_S))
        except TimeoutError as exc:
            raise Unserved(f"the pattern {pattern[:60]!r} takes too long to match") from exc
        if (took_s := time.perf_counter() - started_s) > _SLOW_S:
            self._left_s -= took_s
        return found is not None


_UNSERVED = {
    "bitsandbytes": "not supported: nf4 and LLM.int8 have layouts that only bitsandbytes' own kernels compute with; "
    "choose GPTQ, AWQ, compressed-tensors or FP8",
    "mxfp4": "not supported: 4-bit floats with shared exponents (MXFP4)",
    "modelopt": "not supported: choose the compressed-tensors or FP8 checkpoint of the same model",
    "fbgemm_fp8": "not supported: choose the compressed-tensors FP8 checkpoint of the same model",
}


# --- GPTQ ---


def _gptq(config: dict[str, Any]) -> Format:
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("is_marlin_format") or form not in ("gptq", "gptq_v2"):
        form = "marlin" if config.get("is_marlin_format") else form
        raise Unserved(f"not supported: checkpoint_format {form}; gptq and gptq_v2 are")
    if (pack := config.get("pack_dtype", "int32")) not in ("int32", "torch.int32"):
        raise Unserved(f"not supported: values packed in {pack}; int32 is")
    rules = _DynamicRules(config)
    bits, group = _gptq_bits(config), int(config["group_size"])
    packing: Packing = "gptq_v2" if form == "gptq_v2" else "gptq"

    def describe(name: str, parts: Mapping[str, StoredTensor]) -> Projection:
        own = rules.of(name)
        bits = _gptq_bits(own)
        qweight = _part(name, parts, "qweight", "I32", 2)
        K, N = qweight.shape[0] * 32 // bits, qweight.shape[1]
        group = _group(name, K, int(own["group_size"]))
        _part(name, parts, "scales", _SCALE_TYPES, (K // group, N))
        _part(name, parts, "qzeros", "I32", (K // group, N * bits // 32))
        tensors = ["qweight", "qzeros", "scales"]
        if "g_idx" in parts:
            _part(name, parts, "g_idx", "I32", (K,))
            tensors.append("g_idx")
        permuted = bool(own.get("desc_act")) and group < K
        if permuted and "g_idx" not in parts:
            raise Unserved(f"desc_act is set, but {name}.g_idx is missing")
        scheme = Scheme(_int(bits), group, zeros=not own.get("sym", True), permuted=permuted)
        return Projection(name, K, N, scheme, packing, tuple(tensors))

    name = f"{form}-int{bits}-{_group_name(group)}"
    return Format("gptq", name, ("qweight",), describe)


def _gptq_bits(config: Mapping[str, Any]) -> int:
    if (bits := int(config["bits"])) not in (4, 8):
        raise Unserved(f"not supported: GPTQ of {bits} bits; 4 and 8 are")
    return bits


class _DynamicRules:
    """GPTQ's `dynamic`: by patterns of modules' names, other settings than the rest has; the first that fits counts."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._rules = dict(config.get("dynamic") or {})
        self._patterns = _Patterns()
        for pattern, settings in self._rules.items():
            self._patterns.add(_without_sign(pattern))
            if not pattern.startswith("-:") and "bits" in settings:
                _gptq_bits(settings)

    def of(self, module: str) -> Mapping[str, Any]:
        for pattern, settings in self._rules.items():
            if pattern.startswith("-:"):
                if self._patterns.match(_without_sign(pattern), module):
                    raise Unserved(
                        f"{module} is quantised in the files, but not by dynamic {pattern!r}"
                    )
            elif self._patterns.match(_without_sign(pattern), module):
                return {**self._config, **settings}
        return self._config


def _without_sign(pattern: str) -> str:
    return pattern[2:] if pattern[:2] in ("+:", "-:") else pattern


# --- AWQ ---


def _awq(config: dict[str, Any]) -> Format:
    bits = int(config.get("bits", config.get("w_bit", 4)))
    group = int(config["group_size"] if "group_size" in config else config["q_group_size"])
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    if version != "gemm":
        raise Unserved(f"not supported: AWQ's version {version}; gemm is")
    if bits != 4:
        raise Unserved(f"not supported: AWQ of {bits} bits; 4 are")
    if not config.get("zero_point", True):
        raise Unserved("not supported: AWQ without zero points")

    def describe(name: str, parts: Mapping[str, StoredTensor]) -> Projection:
        qweight = _part(name, parts, "qweight", "I32", 2)
        K, N = qweight.shape[0], qweight.shape[1] * 8
        size = _group(name, K, group)
        _part(name, parts, "scales", _SCALE_TYPES, (K // size, N))
        _part(name, parts, "qzeros", "I32", (K // size, N // 8))
        scheme = Scheme("int4", size, zeros=True)
        return Projection(name, K, N, scheme, "awq", ("qweight", "qzeros", "scales"))

    return Format("awq", f"awq-int4-{_group_name(group)}", ("qweight",), describe)


# --- compressed-tensors ---

_CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_CT_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class _CtGroup:
    """One of `config_groups`."""

    kind: Kind
    strategy: str
    size: int  # of groups
    rows: int  # and columns, of blocks
    columns: int
    symmetric: bool
    form: str
    targets: tuple[str, ...]
    quantised_inputs: bool  # to FP8

    def fits(self, name: str, patterns: _Patterns) -> bool:
        return any(
            patterns.match(target[3:], name) if target.startswith("re:") else target == name
            for target in self.targets
        )


def _compressed_tensors(config: dict[str, Any]) -> Format:
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise Unserved("not supported: sparse weights")
    if config.get("transform_config"):
        raise Unserved("not supported: weights that are rotated (transform_config)")
    groups = [_ct_group(config, each) for each in dict(config["config_groups"]).values()]
    if not groups:
        raise Unserved("not supported: no config_groups")
    patterns = _Patterns()
    for target in (each for group in groups for each in group.targets):
        if target.startswith("re:"):
            patterns.add(target[3:])

    def describe(name: str, parts: Mapping[str, StoredTensor]) -> Projection:
        named = (group for group in groups if group.fits(name, patterns))
        # Classes of modules, of which projections have one, and names less exact than these.
        of_class = (group for group in groups if "Linear" in group.targets)
        group = next(named, None) or next(of_class, None)
        if group is None and len(groups) > 1:
            raise Unserved(f"{name} is quantised, but in no group of config_groups")
        group = group or groups[0]
        if group.form == "pack-quantized":
            return _ct_packed(name, parts, group)
        return _ct_plain(name, parts, group)

    first = groups[0]
    scale = str(first.size) if first.strategy == "group" else first.strategy
    name = f"compressed-tensors-{first.kind}-{scale}"
    return Format("compressed-tensors", name, ("weight_packed", "weight"), describe)


def _ct_group(config: Mapping[str, Any], group: Mapping[str, Any]) -> _CtGroup:
    form = group.get("format") or config.get("format")
    if form not in _CT_FORMATS:
        raise Unserved(f"not supported: format {form}; {', '.join(_CT_FORMATS)} are")
    weights = group.get("weights")
    if not weights:
        raise Unserved("not supported: a config group without weights")
    if group.get("output_activations"):
        raise Unserved("not supported: quantised outputs (output_activations)")
    bits, type_ = int(weights["num_bits"]), weights.get("type", "int")
    kinds: dict[tuple[int, str], Kind] = {
        (4, "int"): "int4",
        (8, "int"): "int8",
        (8, "float"): "fp8",
    }
    kind = kinds.get((bits, type_))
    if kind is None or (kind == "int4") != (form == "pack-quantized" and bits == 4):
        raise Unserved(f"not supported: weights of {bits} bits, {type_}, in format {form}")
    if (form == "pack-quantized" and kind == "fp8") or (
        form == "float-quantized" and kind != "fp8"
    ):
        raise Unserved(f"not supported: weights of {bits} bits, {type_}, in format {form}")
    if kind == "int4" and group.get("input_activations"):
        # Their kernels, and some of their scales, belong to the activations' type.
        raise Unserved("not supported: weights of 4 bits for quantised activations (W4A8)")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size else "tensor")
    if strategy not in _CT_STRATEGIES or (strategy == "block" and kind != "fp8"):
        raise Unserved(f"not supported: {type_} weights by strategy {strategy}")
    if weights.get("actorder") not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise Unserved(f"not supported: actorder {weights['actorder']}")
    symmetric = bool(weights.get("symmetric", True))
    if kind == "fp8" and not symmetric:
        raise Unserved("not supported: FP8 with zero points")
    rows, columns = weights.get("block_structure") or (1, 1)
    inputs = group.get("input_activations") or {}
    return _CtGroup(
        kind,
        strategy,
        int(size or -1),
        int(rows),
        int(columns),
        symmetric,
        form,
        tuple(group["targets"]),
        kind == "fp8" and (inputs.get("num_bits"), inputs.get("type")) == (8, "float"),
    )


def _ct_packed(name: str, parts: Mapping[str, StoredTensor], group: _CtGroup) -> Projection:
    per_word = 8 if group.kind == "int4" else 4
    packed = _part(name, parts, "weight_packed", "I32", 2)
    N, K = packed.shape[0], packed.shape[1] * per_word
    size = _group(name, K, group.size if group.strategy == "group" else -1)
    scale = (1,) if group.strategy == "tensor" else (N, K // size)
    _part(name, parts, "weight_scale", _SCALE_TYPES, scale)
    tensors = ["weight_packed", "weight_scale", "weight_shape"]
    _part(name, parts, "weight_shape", ("I64", "I32"), (2,))
    if not group.symmetric:
        if group.strategy == "tensor":
            raise Unserved(f"not supported: {name} has one zero point for all its values")
        _part(name, parts, "weight_zero_point", "I32", (cdiv(N, per_word), K // size))
        tensors.append("weight_zero_point")
    if "weight_g_idx" in parts:
        _part(name, parts, "weight_g_idx", ("I32", "I64"), (K,))
        tensors.append("weight_g_idx")
    permuted = "weight_g_idx" in parts and size < K
    scheme = Scheme(group.kind, size, zeros=not group.symmetric, permuted=permuted)
    return Projection(name, K, N, scheme, "packed", tuple(tensors))


def _ct_plain(name: str, parts: Mapping[str, StoredTensor], group: _CtGroup) -> Projection:
    weight = _part(name, parts, "weight", "F8_E4M3" if group.kind == "fp8" else "I8", 2)
    N, K = weight.shape
    tensors = ["weight", "weight_scale"]
    if "weight_g_idx" in parts:
        raise Unserved(f"not supported: {name} has its channels in another order (actorder)")
    if group.strategy == "block":
        blocks = group.rows, group.columns
        return _blocks(name, parts, "weight_scale", blocks, group.quantised_inputs)
    if group.strategy == "tensor":
        _part(name, parts, "weight_scale", _SCALE_TYPES, ((), (1,), (1, 1)))
        scheme = Scheme(group.kind, K, zeros=not group.symmetric)
    else:
        size = _group(name, K, group.size if group.strategy == "group" else -1)
        _part(name, parts, "weight_scale", _SCALE_TYPES, (N, K // size))
        scheme = Scheme(group.kind, size, zeros=not group.symmetric)
    if not group.symmetric:
        _part(name, parts, "weight_zero_point", ("I8",), parts["weight_scale"].shape)
        tensors.append("weight_zero_point")
    return Projection(name, K, N, scheme, "plain", tuple(tensors), group.quantised_inputs)


# --- FP8 ---


def _fp8(config: dict[str, Any]) -> Format:
    if (form := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise Unserved(f"not supported: FP8 in {form}; e4m3 is")
    if (meaning := config.get("weight_scale_semantics")) is not None:
        # gptqmodel divides by what others multiply with, under the same name.
        raise Unserved(f"not supported: scales that divide (weight_scale_semantics {meaning})")
    block = config.get("weight_block_size")
    # Of checkpoints in blocks, older ones do not say so.
    quantised = config.get("activation_scheme", "dynamic") in ("dynamic", "static")

    def describe(name: str, parts: Mapping[str, StoredTensor]) -> Projection:
        scale = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        if block is not None:
            return _blocks(name, parts, scale, (int(block[0]), int(block[1])), quantised)
        weight = _part(name, parts, "weight", "F8_E4M3", 2)
        N, K = weight.shape
        _part(name, parts, scale, _SCALE_TYPES, ((), (1,), (1, 1), (N,), (N, 1)))
        return Projection(name, K, N, Scheme("fp8", K), "plain", ("weight", scale), quantised)

    text = "tensor" if block is None else f"block-{block[0]}x{block[1]}"
    return Format("fp8", f"fp8-{text}", ("weight",), describe)


def _blocks(
    name: str,
    parts: Mapping[str, StoredTensor],
    scale: str,
    block: tuple[int, int],
    quantised_inputs: bool,
) -> Projection:
    N, K = _part(name, parts, "weight", "F8_E4M3", 2).shape
    rows, columns = block
    if rows < 1 or columns < _LEAST_GROUP or columns % _LEAST_GROUP:
        raise Unserved(f"not supported: blocks of {rows} x {columns}")
    _part(name, parts, scale, _SCALE_TYPES, (cdiv(N, rows), cdiv(K, columns)))
    scheme = Scheme("fp8", columns, rows)
    return Projection(name, K, N, scheme, "plain", ("weight", scale), quantised_inputs)


# --- parts ---


def _part(
    name: str,
    parts: Mapping[str, StoredTensor],
    leaf: str,
    dtypes: str | tuple[str, ...],
    shape: int | tuple[int, ...] | tuple[tuple[int, ...], ...],
) -> StoredTensor:
    """One of a projection's tensors, of one of these types and shapes, or of so many dimensions."""
    found = parts.get(leaf)
    if found is None:
        raise Unserved(f"{name}.{leaf} is missing")
    fits = found.dtype in ((dtypes,) if isinstance(dtypes, str) else dtypes)
    if isinstance(shape, int):
        fits = fits and len(found.shape) == shape
    else:
        fits = fits and found.shape in (shape, *(each for each in shape if isinstance(each, tuple)))
    if not fits:
        sizes = " x ".join(map(str, found.shape)) or "one value"
        raise Unserved(f"{name}.{leaf} is {found.dtype}, {sizes}: not as its format has it")
    return found


def _group(name: str, K: int, group: int) -> int:
    """Input channels that share a scale; -1: all.

    Raises:
        Unserved: kernels take them by multiples of 32.
    """
    size = K if group == -1 else group
    if size < _LEAST_GROUP or size % _LEAST_GROUP or K % size:
        raise Unserved(
            f"not supported: {name} has {K} input channels in groups of {size}, not whole groups of "
            f"a multiple of {_LEAST_GROUP}"
        )
    return size


def _group_name(group: int) -> str:
    return "channel" if group == -1 else str(group)


def _int(bits: int) -> Kind:
    return "int4" if bits == 4 else "int8"


_READERS: dict[str, Callable[[dict[str, Any]], Format]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
}
