"""`tierwise curriculum`: parse, call one function of `tierwise.curriculum`, print its records."""

from __future__ import annotations

import click


@click.group()
def group() -> None:
    """Which sample: score, select, train, audit."""
