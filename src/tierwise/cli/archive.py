"""`tierwise archive`: parse, call one function of `tierwise.archive`, print its records."""

from __future__ import annotations

import click


@click.group()
def group() -> None:
    """Which medium: a file system over a disc library."""
