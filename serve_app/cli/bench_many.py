"""`sleepserve bench many`: arguments in; servers, tables and files are others' business."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serve_app.cli.bench_run import check_writable, measure, usage_errors
from serve_app.cli.output import EXIT_FAILED

if TYPE_CHECKING:
    from serve_app.bench.many.run import Plan
    from serve_app.config.files import ServeConfig

_DURATION_S = 300.0
_SEED = 0


def many(
    config: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG...",
            help="A serve_config.yaml with `card.memory_budget`, or models' YAML files. The busiest app goes "
            "to the first model.",
        ),
    ],
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="csv or csv.gz: arrival_s, prompt_tokens, output_tokens, and app where there are several. Ten "
            "minutes of 16 apps of ServeGen when absent.",
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE|SIZE", help="In place of the file's: 0.5 of the card, or 60 GiB."
        ),
    ] = None,
    apps: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The busiest of the trace; one per model when absent."
        ),
    ] = None,
    time_scale: Annotated[
        float,
        typer.Option(
            min=0.0001, metavar="X", help="Of the trace's times: 0.5 sends twice as fast."
        ),
    ] = 1.0,
    duration: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Send nothing more after this.")
    ] = _DURATION_S,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Shorten longer prompts; what fits when absent."),
    ] = None,
    max_output_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Shorten longer answers; a quarter of the model's length when absent.",
        ),
    ] = None,
    variants: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="shared (as configured), static, one-at-a-time, lru, restart, infinite, or all.",
        ),
    ] = "all",
    limit_s: Annotated[
        float | None,
        typer.Option("--limit-s", metavar="SECONDS", min=0, help="Begin no variant after this."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the whole result there, too."),
    ] = None,
) -> None:
    """Many models on one card: a trace of requests against each way to share it.

    Every way has a server of its own on loopback, with the same trace, open loop, streamed. One request in
    ten is a question that was asked before, of the model alone on a server as configured; the answers are
    compared.
    """
    with usage_errors():
        check_writable(json_file)
        from serve_app.bench.many.run import ManyBench
        from serve_app.bench.many.tables import tables

        served = _served(config, memory_budget)
        plan = _plan(
            [model.model_id for model in served.models],
            trace,
            apps,
            time_scale,
            duration,
            variants,
            (max_prompt_tokens, max_output_tokens),
            limit_s,
        )
        bench = ManyBench(served, plan)
    code = measure(bench, tables, bench.clients(), json_file)
    raise typer.Exit(code or (EXIT_FAILED if bench.failed else 0))


def _served(names: Sequence[str], memory_budget: str | None) -> "ServeConfig":
    """With a budget, and without keys: nobody else reaches it."""
    from actors.card.config import CardConfig
    from actors.checkpoints.source import DEFAULT_HUB, Hub
    from actors.engine.model.cards import has_nvidia_driver
    from serve_app.bench.many.variants import card_of, without_keys
    from serve_app.config.compose import Options, compose
    from serve_app.config.errors import validate

    config = compose(names, Options(hub=Hub(DEFAULT_HUB), num_gpus=int(has_nvidia_driver())))
    card = card_of(config.data)
    if memory_budget is not None:
        card["memory_budget"] = _share_or_size(memory_budget)
        validate(CardConfig, card)
    if card.get("memory_budget") is None:
        raise ValueError("no card.memory_budget there; name it with --memory-budget")
    without_keys(config.data)
    return config


def _share_or_size(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _plan(
    models: Sequence[str],
    trace: Path | None,
    apps: int | None,
    time_scale: float,
    duration: float,
    variants: str,
    most_tokens: tuple[int | None, int | None],
    limit_s: float | None,
) -> "Plan":
    from serve_app.bench.many.run import Plan
    from serve_app.bench.many.trace import SAMPLE, cut, deal, read_trace, with_apps
    from serve_app.bench.many.variants import VARIANTS

    named = set(VARIANTS if variants == "all" else variants.split(","))
    if unknown := named - VARIANTS.keys():
        known = ", ".join(VARIANTS)
        raise ValueError(f"--variants takes {known} or all; found {', '.join(sorted(unknown))}")
    file = trace or SAMPLE
    apps = apps or len(models)
    sent = cut(with_apps(read_trace(file), apps, _SEED), time_scale, duration)
    if not sent:
        raise ValueError(f"{file}: nothing arrives within --duration {duration:g}")
    dealt = deal(sent, apps, models)
    return Plan(
        trace=file.name,
        time_scale=time_scale,
        dealt=dealt,
        left_out=len(sent) - len(dealt),
        variants=[name for name in VARIANTS if name in named],
        max_prompt_tokens=most_tokens[0],
        max_output_tokens=most_tokens[1],
        limit_s=limit_s,
    )
