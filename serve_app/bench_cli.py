"""`sleepserve bench`: measurements, one command each."""

import typer

from serve_app.bench_autoscaling_cli import autoscaling
from serve_app.bench_http_cli import ManyValues, http
from serve_app.bench_local_cli import register
from serve_app.bench_report_cli import report
from serve_app.bench_serve_cli import serve

bench = typer.Typer(
    help="Measure: a server under load; a model on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench.command("http", cls=ManyValues)(http)
bench.command("serve", cls=ManyValues)(serve)
register(bench)
bench.command()(autoscaling)
bench.command()(report)
