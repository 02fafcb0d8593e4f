"""Tokens per second of the engine, in this process, without HTTP and Serve.

python -m docs.results.throughput CHECKPOINT|CONFIG      # --help: concurrency, sampling, profiles, files

Figures on stdout, progress on stderr. Exit codes: those of `sleepserve bench wake`.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.bench_http import ManyValues
from serve_app.cli.bench_local import Engine, JsonFile, LimitS, Target, prepare_imports
from serve_app.cli.bench_run import check_writable, measure, usage_errors

app = typer.Typer(pretty_exceptions_enable=False)


@app.command(cls=ManyValues)
def throughput(
    target: Target,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N...", help="Requests at once; 1 16 64 256 when absent."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of a prompt.")] = 128,
    answer_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Of an answer.")] = 128,
    sampling: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Also compare sampling settings (top_p, repetition_penalty, 300 biased tokens, ...) "
            "with plain greedy answers, N requests at once.",
        ),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="DIR",
            help="Write there what the device does in 20 decode steps, and while prompts are computed.",
        ),
    ] = None,
    engine: Engine = None,
    limit_s: LimitS = None,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second of the engine, in this process, without HTTP and Serve."""
    with usage_errors():
        check_writable(json_file)
        if profiles is not None:
            profiles.mkdir(parents=True, exist_ok=True)
        prepare_imports()
        from docs.results.throughput.bench import Plan, ThroughputBench, large_subject, tables

        plan = Plan(
            concurrency=tuple(concurrency or Plan().concurrency),
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            sampling=sampling,
            profiles=profiles,
            limit_s=limit_s,
        )
        bench = ThroughputBench(large_subject(target, engine), plan)
    raise typer.Exit(measure(bench, tables, nullcontext(), json_file))


if __name__ == "__main__":
    app()
