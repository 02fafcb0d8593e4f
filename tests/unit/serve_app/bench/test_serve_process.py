"""What `ServeProcess` knows of processes and sockets, without any server."""

import os
import socket

import psutil

from serve_app.bench.serve_process import _listening, _sockets_of


def test_socket_that_listens_is_told_with_its_port_until_it_is_closed() -> None:
    def listening() -> set[int]:
        mine = _sockets_of([psutil.Process(os.getpid())])
        return {port for inode, port in _listening().items() if inode in mine}

    before = listening()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening() - before == {server.getsockname()[1]}
    assert listening() == before


def test_process_that_is_gone_has_no_sockets() -> None:
    gone = psutil.Popen(["true"])
    assert gone.wait(10) == 0
    assert _sockets_of([gone]) == set()
