"""`sleepserve bench`: measurements, one command each."""

import typer

from serve_app.cli.bench_http import ManyValues, http
from serve_app.cli.bench_local import register
from serve_app.cli.bench_many import many

bench = typer.Typer(
    help="Measure: a server under load; models that share a card; a model on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench.command("http", cls=ManyValues)(http)
bench.command("many")(many)
register(bench)
