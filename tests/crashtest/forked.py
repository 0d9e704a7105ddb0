"""Starts scripts as forks of a process that has imported torch: a tenth of the processor time.

``python forked.py serve SOCKET`` waits for requests. ``python forked.py run SOCKET SCRIPT ...`` has
the script run with this process's environment, folder and output, and ends as it ends. The script
is a process of its own all the same, which crash tests kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys

_MOST_BYTES = 1 << 20


def run(path: str, command: list[str]) -> int:
    """Have a command run; returns its exit status, negative for a signal."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        request = json.dumps({"command": command, "env": dict(os.environ), "cwd": os.getcwd()})
        socket.send_fds(server, [request.encode()], [1, 2])
        return int(server.recv(64) or b"-9")


def serve(path: str) -> None:
    """Fork for each request, until killed."""
    import runpy

    import torch._dynamo
    import torch.optim.swa_utils

    import checkfreq.manager  # noqa: F401
    import iterators.cf_iterator  # noqa: F401

    torch.nn.Linear(1, 1)(torch.zeros(1, 1)).sum().backward()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(16)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    listener.close()
    data, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
    request = json.loads(data)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # it was killed too
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    for number, fd in enumerate(fds, start=1):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if "CHECKFREQ_CRASHTEST" in os.environ:
        from checkfreq.crashtest import hooks

        hooks.install()
    sys.argv = request["command"]
    del request, data, fds, connection, listener
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        code = run(sys.argv[2], sys.argv[3:])
        sys.exit(code if code >= 0 else 128 - code)
