"""``python -m inference.serve MODEL``: a small HTTP service over one checkpoint.

``POST /predict`` takes an image as the multipart form field ``image`` and gives the answer that the batch script gives
for the same file. ``GET /healthz`` is 200 once the model is loaded, for a load balancer to ask. What is wrong with
a request comes back as one sentence in ``detail``. Options are checked and the port is taken before torch is loaded.
"""

from __future__ import annotations

from ckpt_tools.signals import killed_by_interrupts

with killed_by_interrupts():
    from pathlib import Path
    from typing import TYPE_CHECKING

    import click

    from .files import check_model
    from .listening import bind, check_address, listen
    from .reporting import report_errors

if TYPE_CHECKING:
    from fastapi import FastAPI


def create_app(model: str | Path) -> FastAPI:
    """The application over a checkpoint, which is loaded here: a bad one stops the start, not the first request."""
    from . import app
    from .architectures import OURS
    from .loading import load_model

    return app.create_app(load_model(model, architecture=OURS))


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", type=int, default=8000, help="The port to listen on; 0 takes a free one.")
def main(model: str, host: str, port: int) -> None:
    """Serve MODEL, a checkpoint of any format, local or remote, over HTTP, until SIGTERM, SIGINT or SIGHUP.

    \b
    Exit codes: 2 usage, 3 not found, 4 not readable, or of another model, 5 the address cannot be listened on,
    7 refused as unsafe, 143, 130 and 129 ended by SIGTERM, SIGINT and SIGHUP.
    """
    with report_errors():
        check_address(host, port)
        run(check_model(model), host, port)


def run(model: str, host: str, port: int) -> None:
    """Serve until told to stop; the address is printed once the service listens, so port 0 is of use."""
    with bind(host, port) as bound:
        from .server import serve

        app = create_app(model)
        click.echo(f"serving on {listen(bound, host)}")
        serve(app, bound)


if __name__ == "__main__":
    with killed_by_interrupts():
        main()
