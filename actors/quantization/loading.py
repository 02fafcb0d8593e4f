"""A model whose quantised projections are QuantizedLinear: its structure, and loaded from a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from actors.quantization.checkpoint import QuantizedCheckpoint
from actors.quantization.formats import Projection, Unserved
from actors.quantization.linear import QuantizedLinear
from actors.quantization.packing import repack


def swap_projections(
    model: PreTrainedModel, found: QuantizedCheckpoint, dtype: torch.dtype
) -> dict[str, Projection]:
    """Put empty QuantizedLinear modules in the places of quantised projections; biases stay.

    Returns:
        By the path of each module in `model`, what it is in the files.

    Raises:
        Unserved: a quantised projection has no place in the model, or one where it would not be used right.
    """
    places = _places(model, found.projections)
    for path, projection in places.items():
        own = model.get_submodule(path)
        assert isinstance(own, nn.Linear)
        with own.weight.device:
            module = QuantizedLinear(projection.K, projection.N, False, projection.scheme, dtype)
        module.bias = own.bias
        model.set_submodule(path, module)
    return places


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
    for name, projection in found.projections.items():
        shape = projection.N, projection.K
        weights[f"{name}.weight"] = torch.empty(1, dtype=dtype).expand(shape)
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
    _check_loaded(told, weights, type(model).__name__)
    for path, projection in swap_projections(model, found, dtype).items():
        stored = {leaf: read(f"{projection.name}.{leaf}") for leaf in projection.tensors}
        module = model.get_submodule(path)
        for leaf, tensor in repack(projection, stored, dtype).items():
            wanted = module.get_parameter(leaf)
            assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype), (path, leaf)
            setattr(module, leaf, nn.Parameter(tensor.to(device), requires_grad=False))
    return model


def _places(model: PreTrainedModel, projections: Mapping[str, Projection]) -> dict[str, Projection]:
    """By their paths in the model, as transformers renames what it loads."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    own = model.state_dict()
    kind = type(model).__name__
    head = model.get_output_embeddings()
    places = {}
    for name, projection in projections.items():
        renamed, converted = rename_source_key(
            f"{name}.weight", renamings, converters, model.base_model_prefix, own
        )
        if converted is not None:
            raise Unserved(
                f"{kind} has {name} in one parameter with others: not supported quantised"
            )
        path = renamed.removesuffix(".weight")
        if renamed not in own:
            raise Unserved(f"{kind} has no {path}, which is quantised in the files: not supported")
        module = model.get_submodule(path)
        # Exactly that: another class has a forward of its own.
        if type(module) is not nn.Linear:
            raise Unserved(
                f"{path} of {kind} is a {type(module).__name__}: not supported quantised"
            )
        if module is head and model.config.get_text_config().tie_word_embeddings:
            raise Unserved(f"{path} shares the embedding's weights: not supported quantised")
        if (module.out_features, module.in_features) != (projection.N, projection.K):
            raise Unserved(
                f"{path} is {projection.N} x {projection.K} in the files, but "
                f"{module.out_features} x {module.in_features} in {kind}"
            )
        places[path] = projection
    return places


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


def _check_loaded(
    told: Mapping[str, Iterable[str]], weights: Mapping[str, Tensor], kind: str
) -> None:
    """Raises ValueError if a tensor is missing, or one has no place."""
    if missing := sorted(told["missing_keys"]):
        raise ValueError(f"the files have no {missing[0]}, which {kind} has")
    for name in sorted(told["unexpected_keys"]):
        # Some packages write a bias for every projection.
        if not (name.endswith(".bias") and not weights[name].any()):
            raise ValueError(f"{kind} has no {name}, which the files have")
