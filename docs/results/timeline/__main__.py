"""One wake looked at closely: what the link and the model did when, and what memory the device had.

python -m docs.results.timeline CHECKPOINT|CONFIG --json FILE      # docs.results.report draws it

The model is woken in this process. Figures on stdout, progress on stderr. Exit codes: those of
`sleepserve bench wake`.
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
    small_subject,
)
from serve_app.cli.bench_run import check_writable, measure, usage_errors

app = typer.Typer(pretty_exceptions_enable=False)


@app.command(cls=ManyValues)
def timeline(
    target: Target,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Length of the prompt.")
    ] = 7,
    pause_s: Annotated[
        float, typer.Option("--pause-s", min=0, metavar="SECONDS", help="Asleep in each cycle.")
    ] = 0.5,
    compressed: Annotated[
        bool, typer.Option("--compressed", help="Also from a compressed image, part by part.")
    ] = False,
    engine: Engine = None,
    json_file: JsonFile = None,
) -> None:
    """Watch a wake segment by segment, and memory over a sleep and a wake."""
    with usage_errors():
        check_writable(json_file)
        prepare_imports()
        from docs.results.timeline.bench import Plan, TimelineBench, tables

        subject = small_subject(target, engine)
        bench = TimelineBench(subject, Plan(prompt_tokens, pause_s, compressed))
    raise typer.Exit(measure(bench, tables, ray_for(subject), json_file))


if __name__ == "__main__":
    app()
