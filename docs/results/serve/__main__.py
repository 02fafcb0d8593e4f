"""One model behind a `serve run` of its own, over HTTP.

python -m docs.results.serve CHECKPOINT|CONFIG      # --help: phases, cycles, load, files

Figures on stdout, progress on stderr, everything as JSON in a file on request, saved after each phase. Exit
codes: 0 measured; 1 a phase failed, or an answer was wrong; 2 usage; 130 interrupted.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.bench_http import ManyValues
from serve_app.cli.bench_local import Engine, JsonFile, LimitS, Target, engine_keys
from serve_app.cli.bench_run import check_writable, run, tell, usage_errors
from serve_app.cli.output import EXIT_FAILED

if TYPE_CHECKING:
    from docs.results.serve.bench import Served

_PROJECT = Path(__file__).parents[3]


app = typer.Typer(pretty_exceptions_enable=False)


@app.command(cls=ManyValues)
def serve(
    target: Target,
    settings: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="For a checkpoint: a file of configs/ with the model's other settings.",
        ),
    ] = None,
    serve_config: Annotated[
        Path, typer.Option(metavar="FILE", help="The applications; its models are replaced.")
    ] = _PROJECT / "serve_config.yaml",
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PHASE...",
            help="latency, throughput, redeploy, memory; all when absent. The start always is one.",
        ),
    ] = None,
    cycles: Annotated[int, typer.Option(min=1, metavar="N", help="Sleeps and wakes.")] = 20,
    pause_s: Annotated[
        float, typer.Option("--pause-s", min=0, metavar="SECONDS", help="Asleep in each cycle.")
    ] = 0.3,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N...", help="Requests at once; 1 16 64 256 when absent."),
    ] = None,
    requests_per_stream: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="One after the other, in each round of a throughput."
        ),
    ] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of a prompt.")] = 128,
    answer_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Of an answer.")] = 128,
    warm_when: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="A line of the log after which a replica is as fast as it will be; waited for.",
        ),
    ] = None,
    engine: Engine = None,
    limit_s: LimitS = None,
    json_file: JsonFile = None,
    log_file: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="Keep the log of serve run there.")
    ] = None,
) -> None:
    """Start `serve run`, and measure it: its start, latency, throughput, a redeploy, a full card.

    The model is a replica that sleeps only when told to. In each cycle it is asked for one token while it
    sleeps, then for 50, which are compared. The redeploy deletes and deploys the application while the
    holder keeps the image. The full card, which needs a GPU, is another process that takes all memory
    while the model sleeps. Each phase has its own time limit.
    """
    with usage_errors():
        check_writable(json_file)
        check_writable(log_file)
        from docs.results.serve.bench import ServeBench
        from docs.results.serve.phases import PHASES, Plan

        if unknown := set(only or ()) - PHASES.keys():
            raise ValueError(f"--only takes {', '.join(PHASES)}; found {', '.join(unknown)}")
        plan = Plan(
            phases=tuple(only or PHASES),
            cycles=cycles,
            pause_s=pause_s,
            concurrency=tuple(concurrency or Plan().concurrency),
            requests_per_stream=requests_per_stream,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            warm_when=_pattern(warm_when),
            limit_s=limit_s,
        )
        served = _served(target, settings, serve_config, engine)
        bench = ServeBench(served, plan, log_file)
    from docs.results.serve.tables import tables

    code = run(bench, bench.serving(), json_file)
    result = bench.result()
    untold = tell(result, tables(result), json_file)
    failed = bench.failed or result.get("latency", {}).get("wrong", 0) > 0
    raise typer.Exit(code or untold or (EXIT_FAILED if failed else 0))


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ValueError(f"--warm-when {text}: {error}") from error


def _served(
    target: Path,
    settings: Path | None,
    serve_config: Path,
    engine: Sequence[str] | None,
) -> "Served":
    from actors.checkpoints.download import ensure_checkpoint
    from actors.checkpoints.source import ModelSource
    from docs.results.serve.bench import Served
    from serve_app.config.files import load_model_config

    if target.is_dir():
        source = ModelSource(id=str(target.resolve()))
        # Of a checkpoint alone, all that must be known is where to compute.
        keys: dict[str, Any] = {"num_gpus": 0 if shutil.which("nvidia-smi") is None else 1}
    elif settings is None:
        settings = target
        source = load_model_config(target).source
    else:
        raise ValueError("--config is for a checkpoint; a file of configs/ has its own settings")
    if settings is not None:
        keys = load_model_config(settings).model_dump(mode="json", exclude_unset=True)
    keys["engine"] = keys.get("engine", {}) | engine_keys(engine)
    return Served.of(
        ensure_checkpoint(source),
        keys,
        settings=None if settings is None else str(settings),
        serve_config=serve_config,
    )


if __name__ == "__main__":
    app()
