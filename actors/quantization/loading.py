"""A model whose quantised projections stay so: its structure, and loaded from a checkpoint."""

# K input channels, N output channels, E experts

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from actors.merging import PROJECTION_GROUPS, MergedProjections, put_merged
from actors.quantization.checkpoint import QuantizedCheckpoint
from actors.quantization.experts import QuantizedExperts, QuantizedStack, fits
from actors.quantization.formats import Projection, Unserved
from actors.quantization.linear import QuantizedLinear, QuantizedWeight
from actors.quantization.mlp import GatedMlp, is_gated
from actors.quantization.packing import repack
from actors.threads import on_threads

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_STACKED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Filling:
    """A projection of the files, and where its tensors belong.

    Attributes:
        module: that has the tensors.
        first: the output channel of the module that is the projection's first.
        expert: of a stack, whose.
    """

    projection: Projection
    module: QuantizedWeight
    first: int = 0
    expert: int | None = None

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of our layout to their places."""
        scheme, N = self.projection.scheme, self.projection.N
        for leaf, tensor in tensors.items():
            target = self.module.get_parameter(leaf).data
            if self.expert is not None:
                target = target[self.expert]
            if leaf == "weight":
                target = target[self.first : self.first + N]
            elif leaf in ("scales", "zeros"):
                begin, columns = self.first // scheme.rows, scheme.scales_shape(1, N)[1]
                target = target[:, begin : begin + columns]
            assert (tensor.shape, tensor.dtype) == (target.shape, target.dtype), leaf
            target.copy_(tensor)


def swap_projections(
    model: PreTrainedModel, found: QuantizedCheckpoint, dtype: torch.dtype
) -> list[Filling]:
    """Put empty quantised modules in the places of projections and experts; biases stay.

    Projections of the same input become one where they are quantised alike.

    Raises:
        Unserved: a quantised projection has no place in the model, or one where it would not be used right.
    """
    return _swap(model, _places(model, found.projections), dtype)


def _swap(model: PreTrainedModel, places: "_Places", dtype: torch.dtype) -> list[Filling]:
    fillings: list[Filling] = []
    for path, experts in places.experts.items():
        fillings += _swap_experts(model, path, experts, dtype)
    by_parent: dict[str, dict[str, Projection]] = {}
    for path, projection in places.linears.items():
        parent, _, name = path.rpartition(".")
        by_parent.setdefault(parent, {})[name] = projection
    for parent, children in by_parent.items():
        module = model.get_submodule(parent)
        for names in PROJECTION_GROUPS:
            group = [children[name] for name in names if name in children]
            owns = [getattr(module, name, None) for name in names]
            biases = {getattr(own, "bias", None) is None for own in owns}
            if len(group) == len(names) and len(biases) == 1 and _are_alike(group):
                fillings += _merge(module, names, group, dtype)
                children = {n: each for n, each in children.items() if n not in names}
        for name, projection in children.items():
            quantised, filling = _quantised(module, (name,), (projection,), dtype)
            setattr(module, name, quantised)
            fillings += filling
        if is_gated(module):
            model.set_submodule(parent, GatedMlp(module))
    return fillings


def load_quantized(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    found: QuantizedCheckpoint,
    dtype: torch.dtype,
    device: str | torch.device,
) -> PreTrainedModel:
    """The finished module, with the bytes of our layout.

    transformers loads all that is not quantised, as it does from any files: names, ties and buffers are its own.
    In the places of quantised weights it gets ones without memory.

    Raises:
        ValueError: files and architecture do not fit, or the files contradict the configuration.
    """
    read = _Reader(found)
    weights = {name: read(name) for name in found.plain}
    with torch.device("meta"):
        empty = kind(deepcopy(config))
    places = _places(empty, found.projections)
    without_memory = {
        **{f"{each.name}.weight": (each.N, each.K) for each in places.linears.values()},
        **{path: empty.get_parameter(path).shape for path in places.stacked()},
    }
    for name, shape in without_memory.items():
        weights[name] = torch.empty(1, dtype=dtype).expand(shape)
    loaded: Any = kind.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        device_map={"": device},
        output_loading_info=True,
    )
    model, told = loaded
    assert isinstance(model, PreTrainedModel)
    require_all(told, type(model).__name__)
    _require_places(told, weights, type(model).__name__)

    def fill(filling: Filling) -> None:
        projection = filling.projection
        stored = {leaf: read(f"{projection.name}.{leaf}") for leaf in projection.tensors}
        filling.fill(repack(projection, stored, dtype))

    on_threads(fill, _swap(model, places, dtype))
    return model


# --- where projections belong ---

# Of each part of a weight, one behind the other: the projections of a layer's experts by number.
_Parts = tuple[dict[int, Projection], ...]


@dataclass(frozen=True, slots=True)
class _Places:
    """By paths in the model: the quantised ones of its linear modules, and of its modules of experts each weight's."""

    linears: dict[str, Projection]
    experts: dict[str, dict[str, _Parts]]

    def stacked(self) -> Iterable[str]:
        """The parameters that hold a weight of each expert."""
        return (f"{path}.{leaf}" for path in self.experts for leaf in _STACKED)


def _places(model: PreTrainedModel, projections: Mapping[str, Projection]) -> _Places:
    """As transformers renames what it loads."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    own = model.state_dict()
    places = _Places({}, {})
    for name, projection in projections.items():
        renamed, source = rename_source_key(
            f"{name}.weight", renamings, converters, model.base_model_prefix, own
        )
        if source is None:
            path = renamed.removesuffix(".weight")
            _check_linear(model, path, renamed in own, projection)
            places.linears[path] = projection
            continue
        converter = next(each for each in converters if source in each.source_patterns)
        path, _, leaf = renamed.rpartition(".")
        number = _EXPERT.search(name)
        if number is None or renamed not in own or not _stacks(converter, leaf):
            raise Unserved(
                f"{type(model).__name__} has {name} in one parameter with others: not supported quantised"
            )
        experts = places.experts.setdefault(path, {})
        parts = experts.setdefault(leaf, tuple({} for _ in converter.source_patterns))
        parts[converter.source_patterns.index(source)][int(number[1])] = projection
    for path, experts in places.experts.items():
        _check_experts(model, path, experts)
    return places


def _stacks(converter: WeightConverter, leaf: str) -> bool:
    """Whether one weight of each expert is stacked, those of its parts one behind the other."""
    shapes = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    wanted: list[tuple[type, int]] = [(MergeModulelist, 0)]
    if leaf == "gate_up_proj":
        wanted.append((Concatenate, 1))
    return leaf in _STACKED and shapes == wanted


def _check_linear(
    model: PreTrainedModel, path: str, is_there: bool, projection: Projection
) -> None:
    kind = type(model).__name__
    if not is_there:
        raise Unserved(f"{kind} has no {path}, which is quantised in the files: not supported")
    module = model.get_submodule(path)
    # Exactly that: another class has a forward of its own.
    if type(module) is not nn.Linear:
        raise Unserved(f"{path} of {kind} is a {type(module).__name__}: not supported quantised")
    if (
        module is model.get_output_embeddings()
        and model.config.get_text_config().tie_word_embeddings
    ):
        raise Unserved(f"{path} shares the embedding's weights: not supported quantised")
    if (module.out_features, module.in_features) != (projection.N, projection.K):
        raise Unserved(
            f"{path} is {projection.N} x {projection.K} in the files, but "
            f"{module.out_features} x {module.in_features} in {kind}"
        )


def _check_experts(model: PreTrainedModel, path: str, experts: Mapping[str, _Parts]) -> None:
    module = model.get_submodule(path)
    where = f"{path} of {type(model).__name__}"
    if not fits(module):
        raise Unserved(f"{where} is a {type(module).__name__}: not supported quantised")
    for leaf in _STACKED:
        E, N, K = module.get_parameter(leaf).shape
        parts = experts.get(leaf, ())
        for part in parts:
            if sorted(part) != list(range(E)):
                raise Unserved(f"{where} has experts that are not quantised beside others")
            if len({each.scheme for each in part.values()}) > 1:
                raise Unserved(f"{where} has experts that are quantised in other ways than others")
        found = [(part[0].N, part[0].K) for part in parts]
        same = all(
            (each.N, each.K) == (part[0].N, part[0].K) for part in parts for each in part.values()
        )
        if not same or sum(n for n, _ in found) != N or {k for _, k in found} != {K}:
            raise Unserved(f"{where} has not {E} times {N} x {K} as {leaf} in the files")


# --- modules in their places ---


def _are_alike(group: Sequence[Projection]) -> bool:
    """Whether their output channels can stand one behind the other in one weight."""
    scheme = group[0].scheme
    return (
        all(each.scheme == scheme and each.K == group[0].K for each in group)
        and not scheme.permuted  # each has an order of its own
        and all(each.N % scheme.rows == 0 for each in group[:-1])
    )


def _merge(
    parent: nn.Module, names: Sequence[str], group: Sequence[Projection], dtype: torch.dtype
) -> list[Filling]:
    product, fillings = _quantised(parent, names, group, dtype)
    merged = MergedProjections(product, [each.N for each in group], 0)
    put_merged(parent, names, names, merged)
    return fillings


def _quantised(
    parent: nn.Module, names: Sequence[str], group: Sequence[Projection], dtype: torch.dtype
) -> tuple[QuantizedLinear, list[Filling]]:
    owns = [parent.get_submodule(name) for name in names]
    with _device_of(owns[0]):
        N = sum(each.N for each in group)
        module = QuantizedLinear(group[0].K, N, False, group[0].scheme, dtype)
    module.made_for_quantised = all(each.quantised_inputs for each in group)
    biases = [own.bias for own in owns if isinstance(own.bias, Tensor)]
    if len(biases) == 1:
        module.bias = nn.Parameter(biases[0].data, requires_grad=False)
    elif biases:
        module.bias = nn.Parameter(torch.cat([each.data for each in biases]), requires_grad=False)
    return module, _one_behind_the_other(module, group, None)


def _swap_experts(
    model: PreTrainedModel, path: str, experts: Mapping[str, _Parts], dtype: torch.dtype
) -> list[Filling]:
    plain = model.get_submodule(path)
    E = len(plain.get_parameter(_STACKED[0]))
    fillings: list[Filling] = []

    def stack(parts: Sequence[dict[int, Projection]]) -> QuantizedStack:
        one = parts[0][0]
        N = sum(part[0].N for part in parts)
        with _device_of(plain):
            module = QuantizedStack(E, one.K, N, one.scheme, dtype)
        for e in range(E):
            fillings.extend(_one_behind_the_other(module, [part[e] for part in parts], e))
        return module

    gate_up = experts["gate_up_proj"]
    together = _are_alike([part[0] for part in gate_up])
    stacks = [stack(parts) for parts in ([gate_up] if together else [(each,) for each in gate_up])]
    swapped = QuantizedExperts(plain, stacks, stack(experts["down_proj"]))
    model.set_submodule(path, swapped)
    return fillings


def _one_behind_the_other(
    module: QuantizedWeight, group: Sequence[Projection], expert: int | None
) -> list[Filling]:
    fillings, first = [], 0
    for each in group:
        fillings.append(Filling(each, module, first, expert))
        first += each.N
    return fillings


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


# --- files ---


class _Reader:
    """The tensors of a checkpoint by name; files are mapped, and read where their bytes are used."""

    def __init__(self, found: QuantizedCheckpoint) -> None:
        self._files = found.files
        self._open = {
            path: safe_open(path, framework="pt") for path in sorted(set(found.files.values()))
        }

    def __call__(self, name: str) -> Tensor:
        tensor: Tensor = self._open[self._files[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor


def require_all(told: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError if the files lack a tensor: transformers makes up random numbers for it.

    Args:
        told: by transformers, of what it has loaded.
        kind: of the model.
    """
    if missing := sorted(told["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"the files have no {missing[0]}{more}, which {kind} has")
    for name, found, wanted in sorted(told["mismatched_keys"]):
        raise ValueError(f"{name} is {[*found]} in the files, and {[*wanted]} in {kind}")


def _require_places(told: Mapping[str, Any], weights: Mapping[str, Tensor], kind: str) -> None:
    """Raises ValueError if a tensor of the files has no place."""
    for name in sorted(told["unexpected_keys"]):
        # Some packages write a bias for every projection.
        if not (name.endswith(".bias") and not weights[name].any()):
            raise ValueError(f"{kind} has no {name}, which the files have")
