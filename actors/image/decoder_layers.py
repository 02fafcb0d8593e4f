"""The one finder of a model's decoder layers."""

from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The decoder layers with their paths in the model, in order; empty if there is no list of them."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():  # outer lists come before those inside a layer
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [(f"{name}.{i}", layer) for i, layer in enumerate(module)]
    return []
