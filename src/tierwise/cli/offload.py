"""`tierwise offload`: parse, call one function of `tierwise.offload`, print its records."""

from __future__ import annotations

import click


@click.group()
def group() -> None:
    """Which device: update on the CPU while backward runs."""
