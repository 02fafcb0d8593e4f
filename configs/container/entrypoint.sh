#!/bin/sh
# `sleepserve serve` in a container. A published port reaches the container's own address, not its loopback, so it
# listens there, but only where clients must send a key. Without one, what a file or --host says holds, else loopback.
set -eu
if [ -n "${SLEEPSERVE_API_KEYS:-}" ]; then
    exec sleepserve serve --host 0.0.0.0 "$@" # a --host of yours comes later, and wins
fi
case " $* " in
*" --host"*) ;;
*) echo "SLEEPSERVE_API_KEYS is not set: unless a configuration file names another host, only this container reaches the server" >&2 ;;
esac
exec sleepserve serve "$@"
