"""Page sizes of the KV cache beside each other: what of it holds no token, and tokens per second.

python -m docs.results.pages CHECKPOINT|CONFIG      # --help: page sizes, concurrency, files

Figures on stdout, progress on stderr. Exit codes: those of `sleepserve bench wake`.
"""

from typing import Annotated

import typer

from serve_app.cli.bench_http import ManyValues
from serve_app.cli.bench_local import (
    Engine,
    JsonFile,
    Target,
    prepare_imports,
    ray_for,
)
from serve_app.cli.bench_run import check_writable, measure, usage_errors

app = typer.Typer(pretty_exceptions_enable=False)


@app.command(cls=ManyValues)
def pages(
    target: Target,
    page_sizes: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N...", help="Tokens in a page; 8 16 32 64 256 when absent."),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N...", help="Requests at once, of 128 + 128 tokens; 64 256 when absent."
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="At once, of each shape whose waste is told.")
    ] = 64,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of which a rate is the median.")
    ] = 5,
    engine: Engine = None,
    json_file: JsonFile = None,
) -> None:
    """Page sizes of the KV cache beside each other: what of it holds no token, and tokens per second.

    The waste is that of 21 + 50, 40 + 168 and 128 + 128 tokens, as the cache's own block tables have it: at a
    sequence's end, and over its life. Each size has a process of its own, and room for as many tokens.
    """
    with usage_errors():
        check_writable(json_file)
        prepare_imports()
        from docs.results.pages.bench import PagesBench, Plan, tables
        from docs.results.throughput.bench import large_subject

        plan = Plan(
            page_sizes=tuple(page_sizes or Plan().page_sizes),
            concurrency=tuple(concurrency or Plan().concurrency),
            requests=requests,
            rounds=rounds,
        )
        subject = large_subject(target, engine)
        bench = PagesBench(subject, plan)
    raise typer.Exit(measure(bench, tables, ray_for(subject), json_file))


if __name__ == "__main__":
    app()
