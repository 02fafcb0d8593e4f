"""A server for the clients, run by the server's interpreter: `python -m tests.clients.server ENVIRONMENT`.

`ENVIRONMENT` is JSON: variables of the server beside the caller's.
Prints its address when it is ready, and stops when its standard input closes.
"""

import json
import sys

from actors.checkpoints.making import write_checkpoint
from tests.e2e.conftest import config_with
from tests.e2e.serve_process import PROJECT, ServeProcess


def main(environment_json: str) -> None:
    environment = json.loads(environment_json)
    write_checkpoint(PROJECT / "checkpoints" / "tiny", "tiny")
    # Short sequences: what is generated at random asks for as many tokens as there can be.
    server = ServeProcess(
        config_with(
            "tiny_cpu.yaml",
            model_id="Qwen",  # what the snippets of the first project ask for
            engine={"max_model_len": 256},
            sleep={"idle_timeout_s": None},
            chat={"tool_parser": "qwen"},  # its template shows none
        ),
        **environment,
    )
    try:
        if keys := environment.get("SLEEPSERVE_ADMIN_KEYS"):
            server.http.headers["Authorization"] = f"Bearer {keys}"
        server.wait_until_ready()
        print(server.url, flush=True)
        sys.stdin.read()
    finally:
        leftovers = server.interrupt()
        server.remove_files()
        leftovers.check()


if __name__ == "__main__":
    main(*sys.argv[1:])
