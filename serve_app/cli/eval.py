"""`sleepserve eval`: arguments in; a table, and a JSON file if asked for, out.

Exit codes: 0 every check passed; 1 one did not, or the model failed; 2 what was asked for is wrong;
130 interrupted, after showing what was measured until then.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from actors.checkpoints.datasets import KNOWN_TEXTS
from actors.checkpoints.errors import DownloadError, WrongRequest
from actors.checkpoints.source import ModelSource
from actors.errors import InvalidRequest, ServingError
from serve_app.bench.eval import evaluate as bench
from serve_app.bench.eval.tables import tables
from serve_app.bench.eval.verdict import Plan, Report
from serve_app.bench.figures import Progress
from serve_app.cli.bench_run import check_writable, progress, tell, usage_errors
from serve_app.cli.download import datasets_dir
from serve_app.cli.operate import Key
from serve_app.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, say
from serve_app.config.errors import ConfigError
from serve_app.openai.requests import SEED_PROMPT

if TYPE_CHECKING:
    from serve_app.config.model import ModelConfig


def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A file of configs/, or a checkpoint directory: it is run in this process.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server, instead of MODEL.", metavar="URL")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Which of the server's models; with --url."),
    ] = None,
    api_key: Key = None,
    prompt: Annotated[str, typer.Option(help="The test input.")] = SEED_PROMPT,
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Greedy tokens to generate and compare.")
    ] = 50,
    ttft_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of the request that finds it asleep.")
    ] = 1,
    cycles: Annotated[int, typer.Option(min=1, metavar="N", help="Sleeps and wakes.")] = 1,
    pause_s: Annotated[
        float,
        typer.Option(
            "--pause-s",
            min=0,
            metavar="SECONDS",
            help="Asleep, before the request: a GPU clears what was given back for up to 0.2 s, and "
            "copies are half as fast meanwhile.",
        ),
    ] = 0.5,
    level: Annotated[
        Literal["1", "2"] | None,
        typer.Option(help="Of the sleep; `sleep.level` of the configuration, or 1, when absent."),
    ] = None,
    keep_layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="First layers that stay on the device; `sleep.keep_layers` when absent.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Text in UTF-8, or Parquet with a column `text`, whose perplexity is compared. When "
            "absent, the beginning of what `sleepserve download --dataset wikitext` has fetched, "
            "else of a chapter that is shipped. Not with --url: a server does not tell it.",
        ),
    ] = None,
    assert_ttft: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Fail if a first token from sleep takes longer."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            dir_okay=False,
            writable=True,
            help="Write the report there, too.",
        ),
    ] = None,
) -> None:
    """Sleep, wake and compare: memory released, first token from sleep, the same output.

    Runs MODEL in this process, or speaks to a server with --url. A baseline is generated, then each
    cycle sleeps, times the first token of a request that finds the model asleep, generates the
    baseline's tokens again and compares them one by one, and so the perplexity of a text.
    """
    with usage_errors():
        _check_combination(model, url, name, keep_layers, text)
        if json_file is not None and not json_file.parent.is_dir():
            raise ValueError(f"--json {json_file}: there is no directory {json_file.parent}")
        if assert_ttft is not None and not 0 < assert_ttft < math.inf:
            raise ValueError(f"--assert-ttft must be above 0 and finite, found {assert_ttft:g}")
        if not math.isfinite(pause_s):
            raise ValueError(f"--pause-s must be finite, found {pause_s:g}")
        config = None if model is None else _config_of(model, keep_layers)
        chosen = int(level) if level else (config.sleep.level if config else 1)
        plan = Plan(
            prompt=prompt,
            max_tokens=max_tokens,
            ttft_tokens=ttft_tokens,
            cycles=cycles,
            pause_s=pause_s,
            level=2 if chosen == 2 else 1,
            ttft_limit_s=assert_ttft,
        )
        passage = None
        if config is not None:
            passage = bench.Passage.read(text) if text else _default_passage()
        check_writable(json_file)

    @asynccontextmanager
    async def opened(on_progress: Progress) -> AsyncIterator[bench.Target]:
        if config is not None:
            from serve_app.bench.eval.in_process import in_process

            async with in_process(config, on_progress) as local:
                yield local
        else:
            from serve_app.bench.eval.over_http import over_http

            assert url is not None, "checked above"
            async with over_http(url, name, api_key) as remote:
                yield remote

    raise typer.Exit(_run(opened, plan, passage, json_file))


# --- what is asked ---


def _check_combination(
    model: str | None,
    url: str | None,
    name: str | None,
    keep_layers: int | None,
    text: Path | None,
) -> None:
    if (model is None) == (url is None):
        raise ValueError("name either a MODEL to run in this process, or a server with --url")
    if url is None and name is not None:
        raise ValueError("--model goes with --url; in this process MODEL says which")
    if url is not None and keep_layers is not None:
        raise ValueError("--keep-layers is for a MODEL; a server has it in sleep.keep_layers")
    if url is not None and text is not None:
        raise ValueError("--text is for a MODEL; a server does not tell the perplexity of a text")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError(f"--url begins with http:// or https://, found {url!r}")


def _config_of(model: str, keep_layers: int | None) -> "ModelConfig":
    from serve_app.config.files import checkpoint_problem, load_model_config
    from serve_app.config.model import ModelConfig

    path = Path(model)
    if path.is_dir():
        config = ModelConfig(model_id="model", source=ModelSource(id=str(path.resolve())))
        # Any directory's name will do, also one that could not be a model's.
        config = config.model_copy(update={"model_id": path.resolve().name})
    else:
        config = load_model_config(path)
    if (problem := checkpoint_problem(config)) is not None:
        raise ConfigError([problem])
    if keep_layers is None:
        return config
    sleep = config.sleep.model_copy(update={"keep_layers": keep_layers})
    return config.model_copy(update={"sleep": sleep})


def _default_passage() -> bench.Passage:
    """What was fetched; what is shipped, where nothing was, or it cannot be read."""
    file = KNOWN_TEXTS["wikitext"].fetched(datasets_dir())
    if file is not None:
        try:
            return bench.Passage.fetched(file)
        except (ValueError, OSError) as error:
            say(f"the text that is shipped is taken: {error}")
    return bench.Passage.shipped()


# --- running ---

_Opened = Callable[[Progress], AbstractAsyncContextManager[bench.Target]]


def _run(opened: _Opened, plan: Plan, passage: bench.Passage | None, json_file: Path | None) -> int:
    """Evaluate, show what was measured, however it ended, and tell the exit code."""
    report: Report | None = None

    async def session(on_progress: Progress) -> None:
        nonlocal report
        async with opened(on_progress) as target:
            report = bench.start(target, plan)
            await bench.evaluate(target, report, passage, on_progress)

    code = 0
    try:
        with progress() as on_progress:
            asyncio.run(session(on_progress))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except (InvalidRequest, WrongRequest, ValueError, OSError) as error:
        code = _failed(error, EXIT_USAGE)
    except (ServingError, DownloadError) as error:
        code = _failed(error, EXIT_FAILED)
    if report is not None:
        report.interrupted = code == EXIT_INTERRUPTED
        report.judge()
        untold = tell(report.model_dump(mode="json"), tables(report), json_file)
        code = code or untold or (0 if report.passed else EXIT_FAILED)
    if code == EXIT_INTERRUPTED:
        say("interrupted")
    return code


def _failed(error: Exception, code: int) -> int:
    say(f"error: {error}")
    return code
