"""What to tell of models whose places, as Ray counts GPUs, and whose card's budget do not go together. Pure.

Ray fills a card before it begins the next one (decision 89), so `num_gpus` says how many replicas come to one.
"""

import math
from collections.abc import Sequence

from actors.card.config import CardConfig
from serve_app.config.model import ModelConfig


def notes_on(
    models: Sequence[ModelConfig], card: CardConfig, has_driver: bool, devices: int = 1
) -> list[str]:
    """All that is told before anything is served: of cards that nobody asked for, and `notes_on_cards`."""
    unused = [note for model in models if (note := model.unused_card(has_driver))]
    return unused + notes_on_cards(models, card, devices)


def notes_on_cards(models: Sequence[ModelConfig], card: CardConfig, devices: int = 1) -> list[str]:
    """Lines about what works, but may not be meant; none where no card is shared.

    Args:
        devices: cards of this machine.
    """
    shares = {model.model_id: model.gpus(card) for model in models if model.gpus(card)}
    if card.memory_budget is None or len(shares) < 2:
        return []
    notes = [
        f"{name} has num_gpus: {share:g}, so Ray places no other model on its card, which card.memory_budget is to "
        "share; leave num_gpus out, or write a share"
        for name, share in shares.items()
        if share > 0.5 and share + min(each for other, each in shares.items() if other != name) > 1
    ]
    replicas = sum(model.most_replicas for model in models if model.gpus(card))
    if devices > 1 and not notes and replicas * max(shares.values()) <= 1:
        of_each = math.ceil(replicas / devices)
        notes.append(
            f"all {replicas} replicas come to one of {devices} cards: Ray fills a card before the next. num_gpus: "
            f"{math.floor(100 / of_each) / 100:g} has {of_each} on each"
        )
    return notes
