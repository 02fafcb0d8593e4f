"""The command `sleepserve`: argument parsing only.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 2 what was asked for is wrong.
Imports that take long stand inside the commands.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from actors.checkpoints.recipes import DtypeName, ShapeName
from actors.quantization.formats import QuantizeName
from serve_app import __version__
from serve_app.cli.bench import bench
from serve_app.cli.doctor_command import doctor
from serve_app.cli.download import download
from serve_app.cli.eval import evaluate
from serve_app.cli.operate import sleep, status, wake
from serve_app.cli.output import errors_in_one_line, say
from serve_app.cli.serve import Dashes, serve

app = typer.Typer(
    help="LLM serving on Ray Serve whose idle replicas sleep and wake.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(cls=Dashes)(serve)
app.command()(download)
app.command("eval")(evaluate)
app.command()(status)
app.command()(sleep)
app.command()(wake)
app.command()(doctor)
app.add_typer(bench, name="bench")


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(help="A serve_config.yaml, or a model's file in configs/.")
    ] = Path("serve_config.yaml"),
) -> None:
    """Tell what is wrong with a configuration, before anything starts."""
    from actors.engine.model.cards import has_nvidia_driver
    from serve_app.config.cards import notes_on
    from serve_app.config.files import check_file

    with errors_in_one_line():
        config = check_file(file)
    for note in notes_on(config.models, config.card, has_nvidia_driver()):
        say(note)
    say(f"{file}: ok, models: {', '.join(model.model_id for model in config.models) or 'none'}")


@app.command("make-checkpoint")
def make_checkpoint(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, help="Where to.")],
    shape: Annotated[ShapeName | None, typer.Option(help="Sizes of the model.")] = None,
    variant_of: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="In the place of a shape: a checkpoint whose files to share, with weights rotated by --seed.",
        ),
    ] = None,
    weights_of: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="In the place of a shape: a checkpoint to --quantize the weights of.",
        ),
    ] = None,
    dtype: Annotated[
        DtypeName | None, typer.Option(help="Type of the weights; the shape's own when absent.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    shards: Annotated[
        int | None,
        typer.Option(min=1, help="Safetensors files at most; each below 4 GiB when absent."),
    ] = None,
    tied: Annotated[
        bool, typer.Option("--tied/--untied", help="Whether the head shares the embedding.")
    ] = False,
    quantize: Annotated[
        QuantizeName | None,
        typer.Option(help="Quantise the projections, as the hubs' files have them."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write in any case, also over other files.")
    ] = False,
) -> None:
    """Write a checkpoint in Hugging Face's layout, with random weights or another's, and print its directory.

    A directory that holds the same checkpoint already is left alone.
    """
    if variant_of is not None:
        from actors.checkpoints.variants import write_variant

        _refuse_others(context, "variant_of", ("seed",))
        with _damaged_files_in_one_line():
            print(write_variant(directory, variant_of, seed))
        return
    if weights_of is not None:
        from actors.checkpoints.quantizing import quantize_checkpoint

        _refuse_others(context, "weights_of", ("quantize", "force"))
        if quantize is None:
            raise typer.BadParameter("--weights-of needs --quantize")
        with _damaged_files_in_one_line(), _bar(str(directory)) as on_progress:
            quantize_checkpoint(
                directory, weights_of, quantize, force=force, on_progress=on_progress
            )
        print(directory)
        return
    if shape is None:
        raise typer.BadParameter("give --shape, --weights-of or --variant-of")
    from actors.checkpoints.making import write_checkpoint

    with _damaged_files_in_one_line(), _bar(str(directory)) as on_progress:
        write_checkpoint(
            directory,
            shape,
            dtype=dtype,
            seed=seed,
            tied=tied,
            shards=shards,
            quantize=quantize,
            force=force,
            on_progress=on_progress,
        )
    print(directory)


def _refuse_others(context: typer.Context, mode: str, taken: Collection[str]) -> None:
    """Ends the command if it was given options that do nothing together with the one of `mode`."""
    words = {param.name: param.opts[0] for param in context.command.params}
    for name, word in words.items():
        if name in ("directory", mode, *taken) or name is None:
            continue
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":  # typer has a click of its own
            raise typer.BadParameter(f"{words[mode]} does not take {word}")


@app.command()
def settings() -> None:
    """Print every setting of the YAML files, with its default, as Markdown."""
    from serve_app.config.table import settings_table

    print(settings_table(), end="")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@contextmanager
def _damaged_files_in_one_line() -> Iterator[None]:
    """`errors_in_one_line`, of safetensors, too: a file is damaged, or the disk is full."""
    from safetensors import SafetensorError

    with errors_in_one_line():
        try:
            yield
        except SafetensorError as error:
            raise ValueError(f"safetensors: {error}") from error


@contextmanager
def _bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, fed with bytes done and bytes in all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
