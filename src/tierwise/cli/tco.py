"""`tierwise tco`: parse, call one function of `tierwise.tco`, print its records."""

from __future__ import annotations

import click


@click.group()
def group() -> None:
    """Which generation: what keeping data costs."""
