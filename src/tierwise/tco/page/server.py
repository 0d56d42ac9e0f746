"""Runs the page on 127.0.0.1 until interrupted. Left out: any other address, and TLS."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from tierwise.core.errors import UsageError
from tierwise.tco.page.app import make_app
from tierwise.tco.scenario import Scenario

LOOPBACK = "127.0.0.1"


def serve_page(base: Scenario, *, port: int, seed: int, ready: Callable[[str], object]) -> None:
    """Serve a scenario's page on loopback until interrupted.

    Args:
        base: What the page shows at first.
        port: TCP port; 0 takes a free one.
        seed: Seed of the draws.
        ready: Called with the address once it accepts connections.

    Raises:
        UsageError: The port is taken or not a port.
    """
    import uvicorn

    listener = _listen(port)
    app = make_app(base, seed=seed)
    config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
    ready(f"http://{LOOPBACK}:{listener.getsockname()[1]}/")
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how the page ends
        uvicorn.Server(config).run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(f"port {port} cannot be used: {error}", hint="try --port 0") from error
    listener.listen(64)
    return listener
