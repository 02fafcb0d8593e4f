"""Where the command begins: little is imported yet, so that Ctrl-C is answered at once."""

import os
import signal


def main() -> None:
    """Import and build the commands, and run the one that was asked for.

    Until they are there, Ctrl-C ends the process on the spot, with a shell's code for that. KeyboardInterrupt would
    be told as a traceback, and is lost where it comes in a callback of the import system's.
    """
    # Not where whoever starts this has it ignored, as a shell does for what runs behind it.
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes_interrupts:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from typer.main import get_command

    from serve_app.cli.main import app

    command = get_command(app)
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()
