"""`sleepserve bench wake | load | soak`: one model on this machine, without a server.

Figures on stdout, progress on stderr, everything as JSON in a file on request. Exit codes: 0 measured;
1 something failed, an answer was wrong, or a limit of --assert was passed; 2 usage; 130 interrupted. What
was measured until then is told in any case.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from actors.rounding import cdiv
from serve_app.cli.bench_http import ManyValues
from serve_app.cli.bench_run import check_writable, measure, run, tell, usage_errors
from serve_app.cli.output import EXIT_FAILED, say
from serve_app.process.environment import LOOPBACK

if TYPE_CHECKING:
    from serve_app.bench.local import Subject

# For a directory, which has no settings of its own; a file of configs/ has.
_SMALL_ENGINE = {"max_requests_per_batch": 64, "max_batch_tokens": 2048}
_SMALL_CACHE_TOKENS = 2**14

Target = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT|CONFIG", help="A checkpoint directory, or a file of configs/."
    ),
]
Engine = Annotated[
    list[str] | None,
    typer.Option(
        "--engine", metavar="KEY=VALUE...", help="Keys of `engine`, as a file of configs/ has them."
    ),
]
LimitS = Annotated[
    float | None,
    typer.Option(
        "--limit-s",
        metavar="SECONDS",
        min=0,
        help="End early, and tell how many were done: once warm, begin nothing after this time.",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the whole result there, too.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `sleepserve bench`."""
    for command in (wake, load, soak):
        app.command(cls=ManyValues)(command)


def wake(
    target: Target,
    variants: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Ours: pipelined, compressed, serial, unpinned, kept, kept-N[-middle|-last], kept-sweep (several "
            "N from 0 to all layers). Others: to, to-pinned, "
            "dispatch-auto, dispatch-balanced, dispatch-balanced_low_0, fresh-load, memory-saver, memory-saver-retained. "
            "`all`, `ours` and `others` stand for their kind.",
        ),
    ] = "all",
    cycles: Annotated[int, typer.Option(min=1, metavar="N", help="Of each of our ways.")] = 20,
    other_cycles: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of each of the others, which take seconds.")
    ] = 3,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N...", help="Lengths of the prompt; 7 when absent."),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="That wait for one more wake a round; answers are compared."
        ),
    ] = 16,
    pause_s: Annotated[
        float, typer.Option("--pause-s", min=0, metavar="SECONDS", help="Asleep in each cycle.")
    ] = 0.3,
    asserted: Annotated[
        list[str] | None,
        typer.Option(
            "--assert",
            metavar="goals|NAME=MAX...",
            help="Exit 1 if a figure is larger: ttft_over_link, sleep_ms, first_sleep_ms, left_gib, "
            "warm_ttft_ms, wrong. `goals` stands for the project's own limit of each.",
        ),
    ] = None,
    engine: Engine = None,
    limit_s: LimitS = None,
    json_file: JsonFile = None,
) -> None:
    """First token of a sleeping model: ours, and what one would do without us, in one run.

    Our ways take turns, and each of the others takes turns with ours; whoever does not wake has left
    the device. The link's own rate is measured in between. 50 greedy tokens are compared after every
    wake of ours.
    """
    with usage_errors():
        limits = _limits(asserted or [])
        check_writable(json_file)
        prepare_imports()
        from serve_app.bench.wake import VARIANTS, Plan, WakeBench
        from serve_app.bench.ways import OURS

        others = tuple(name for name in VARIANTS if name not in OURS)
        kinds = {"all": VARIANTS, "ours": OURS, "others": ("pipelined", *others)}
        named = [part for name in variants.split(",") for part in kinds.get(name, (name,))]
        plan = Plan(
            variants=tuple(dict.fromkeys(named)),
            cycles=cycles,
            baseline_cycles=other_cycles,
            prompt_tokens=tuple(prompt_tokens or Plan().prompt_tokens),
            requests=requests,
            pause_s=pause_s,
            limit_s=limit_s,
        )
        subject = small_subject(target, engine)
        bench = WakeBench(subject, plan)
    from serve_app.bench.wake_report import judge, tables

    code = run(bench, ray_for(subject), json_file)
    result = bench.result()
    verdicts = judge(result, limits)
    result["verdicts"] = [
        {"name": v.name, "found": v.found, "limit": v.limit, "kept": v.kept} for v in verdicts
    ]
    failed = result["wrong"] > 0 or not all(verdict.kept for verdict in verdicts)
    lines = [*([""] if verdicts else []), *map(str, verdicts)]
    untold = tell(result, tables(result), json_file, lines)
    raise typer.Exit(code or untold or (EXIT_FAILED if failed else 0))


def load(
    target: Target,
    replicas: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Start so many at once in the end; 1: leave it out."),
    ] = 4,
    engine: Engine = None,
    limit_s: LimitS = None,
    json_file: JsonFile = None,
) -> None:
    """What a new instance takes: from disk, and from the image in the object store.

    Each instance is a fresh process. The page cache is dropped first, where the file system lets us;
    what storage really delivered is told.
    """
    with usage_errors():
        check_writable(json_file)
        prepare_imports()
        from serve_app.bench.load import LoadBench, Plan, tables

        subject = small_subject(target, engine)
        bench = LoadBench(subject, Plan(replicas, limit_s))
    raise typer.Exit(measure(bench, tables, ray_for(subject), json_file))


def soak(
    target: Target,
    cycles: Annotated[int, typer.Option(min=1, metavar="N", help="Sleeps and wakes.")] = 1000,
    requests: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="That wait for every 20th wake; answers are compared."
        ),
    ] = 16,
    compressed: Annotated[bool, typer.Option(help="From a compressed image.")] = False,
    engine: Engine = None,
    limit_s: LimitS = 420.0,
    json_file: JsonFile = None,
) -> None:
    """Sleep and wake a thousand times: does anything grow, is every token the same?"""
    with usage_errors():
        check_writable(json_file)
        prepare_imports()
        from serve_app.bench.soak import Plan, SoakBench, tables

        subject = small_subject(target, engine)
        bench = SoakBench(subject, Plan(cycles, requests, compressed, limit_s))
    raise typer.Exit(measure(bench, tables, ray_for(subject), json_file))


# --- arguments ---


def prepare_imports() -> None:
    os.environ.update({**LOOPBACK, **os.environ})  # our Ray is for this process and its children
    say("importing torch")


def small_subject(target: Path, changes: Sequence[str] | None) -> "Subject":
    return subject_with(target, _SMALL_ENGINE, _SMALL_CACHE_TOKENS, changes)


def subject_with(
    target: Path, defaults: Mapping[str, object], tokens: int, changes: Sequence[str] | None
) -> "Subject":
    """A target's subject; a directory's engine has these defaults, and room for so many tokens."""
    from serve_app.bench.local import engine_of, subject_of

    keys = engine_keys(changes)
    pages = engine_of({k: v for k, v in keys.items() if k == "page_size"})
    return subject_of(target, {**defaults, "num_blocks": cdiv(tokens, pages.page_size)}, keys)


def engine_keys(changes: Sequence[str] | None) -> dict[str, object]:
    """What --engine says: KEY=VALUE, the value as in a file of configs/."""
    keys: dict[str, object] = {}
    for pair in changes or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--engine takes KEY=VALUE, found {pair}")
        try:
            keys[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            text = f"--engine takes KEY=VALUE, the value in YAML; found {pair}"
            raise ValueError(text) from None
    return keys


def _limits(asserted: Sequence[str]) -> dict[str, float]:
    """Name of a figure -> the largest it may be."""
    from serve_app.bench.wake_report import GOALS

    limits: dict[str, float] = {}
    for text in asserted:
        if text == "goals":
            limits |= {name: goal.limit for name, goal in GOALS.items()}
            continue
        name, equals, value = text.partition("=")
        if name not in GOALS or not equals:
            known = ", ".join(GOALS)
            raise ValueError(f"--assert takes goals or NAME=MAX, found {text}; names are {known}")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"--assert {name} takes a number, found {value}") from None
    return limits


def ray_for(subject: "Subject") -> AbstractContextManager[None]:
    from serve_app.bench.local import local_ray

    return local_ray(subject.store_bytes)
