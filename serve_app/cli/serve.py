"""`sleepserve serve`: models on the command line, one Ray Serve with them.

Exit codes: 2 what was asked for is wrong; else that of `serve run`, which this process becomes.
"""

import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from actors.checkpoints.source import DEFAULT_HUB, Hub, HubName
from serve_app.cli.output import EXIT_USAGE, errors_in_one_line, say
from serve_app.config.keys import ADMIN_KEYS_VARIABLE, API_KEYS_VARIABLE, Access, KeyRing, read_keys
from serve_app.process.environment import serve_environment
from serve_app.process.haproxy import remove_ended
from serve_app.process.ports import listen_error


class Dashes(TyperCommand):
    """Names of options may have underscores for dashes, as vLLM's: `--max_model_len 4096`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [_dashed(arg) for arg in args])


def _dashed(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else arg


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="OWNER/NAME on a hub, a checkpoint directory, a model's YAML file, or one "
            "serve_config.yaml; the demo model when absent.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 127.0.0.1 when absent.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="8000 when absent.", show_default=False)
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The `model` that clients ask for; more: other names."),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="In place of the checkpoint's: a file, or Jinja itself."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of prompt and output together.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of a card's memory, for each replica.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the weights; the checkpoint's own when absent."),
    ] = None,
    hub: Annotated[HubName, typer.Option(help="Where OWNER/NAME is.")] = DEFAULT_HUB,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit on the hub.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=API_KEYS_VARIABLE,
            show_envvar=True,
            help="That clients must send; several with commas. Operators' are in "
            f"{ADMIN_KEYS_VARIABLE}. Other users of this machine can read a command line.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the serve_config.yaml, and start nothing.")
    ] = False,
) -> None:
    """Serve models on this machine until Ctrl-C, after a check of the configuration.

    On a cluster: --print-config, then `serve run` or `serve deploy`.
    """
    import yaml

    from actors.engine.model.cards import has_nvidia_driver
    from serve_app.config.cards import notes_on
    from serve_app.config.compose import Options, compose

    has_driver = has_nvidia_driver()
    options = Options(
        hub=Hub(hub),
        num_gpus=int(has_driver),
        host=host,
        port=port,
        served_model_names=tuple(served_model_name or ()),
        chat_template=chat_template,
        dtype=dtype,
        revision=revision,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    environment = serve_environment(os.environ)
    if api_key is not None:
        environment[API_KEYS_VARIABLE] = api_key
    with errors_in_one_line():
        config = compose(models or [], options)
        keys = _keys(config.data, environment)
    text = yaml.safe_dump(config.data, sort_keys=False, allow_unicode=True)
    if print_config:
        print(text, end="")
        return
    http_options = config.data["http_options"]
    if problem := _port_problem(http_options["host"], http_options["port"], environment):
        say(problem)
        raise typer.Exit(EXIT_USAGE)
    for note in notes_on(config.models, config.card, has_driver):
        say(note)
    for line in _hints(http_options, [model.model_id for model in config.models], keys):
        say(line)
    remove_ended(environment)
    _become_serve_run(text, environment)


def _keys(config: Mapping[str, Any], environment: Mapping[str, str]) -> KeyRing:
    """Those that the ingress will have, or why it would not start."""
    from serve_app.config.files import LLM

    for application in config["applications"]:
        if application["import_path"] == LLM:
            http = application["args"].get("http", {})
            return read_keys(http.get("api_keys_file"), http.get("admin_keys_file"), environment)
    return KeyRing()


def _port_problem(host: str, port: int, environment: Mapping[str, str]) -> str | None:
    """Why nobody can listen there, which Ray tells a minute later, if at all.

    Where `serve run` joins a Ray, the port may be that of its Serve, which gets other models then. A name that
    this machine does not know is left to Serve.
    """
    from ray._private.utils import read_ray_address

    from serve_app.cli.checks import check_port

    if (environment.get("RAY_ADDRESS") or read_ray_address() or "local") != "local":
        return None
    error = listen_error(host, port)
    if error is None or isinstance(error, socket.gaierror):
        return None
    remedy = "is a server running already? Else choose another --port"
    finding = check_port("HTTP", host, port, error, remedy)
    return f"{finding.text}; {finding.remedy}"


def _hints(http_options: Mapping[str, Any], names: list[str], keys: KeyRing) -> list[str]:
    host, port = str(http_options["host"]), http_options["port"]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    header = ' -H "Authorization: Bearer $KEY"' if keys.guards(Access.INFERENCE) else ""
    lines = []
    if not keys.keys and not _is_loopback(host):
        lines.append(
            f"no keys: every client that reaches {url} may do everything; see --api-key and "
            f"{ADMIN_KEYS_VARIABLE}"
        )
    if names:
        body = f'{{"model": "{names[0]}", "max_tokens": 32, "messages": [{{"role": "user", "content": "Hello"}}]}}'
        lines += [
            f"Serving {', '.join(names)}. When the models are up, try:",
            f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\",
            f"    -d {shlex.quote(body)}",
        ]
    return lines


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _become_serve_run(config: str, environment: Mapping[str, str]) -> None:
    """This process goes on as `serve run`, which so has the environment from its first import, and gets the signals."""
    # A file in memory, which is gone with its last reader: nobody would be left to remove one on a disk.
    file = os.memfd_create("serve_config.yaml", 0)
    with os.fdopen(file, "w", encoding="utf-8", closefd=False) as writer:
        writer.write(config)
    sys.stdout.flush()
    command = [sys.executable, "-m", "ray.serve.scripts", "run", f"/dev/fd/{file}"]
    os.execve(sys.executable, command, dict(environment))
