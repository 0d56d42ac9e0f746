"""Options and output shared by every verb."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class InterruptedVerb(click.Abort):
    """A Ctrl-C with its own word on how to go on, where the same command would not."""

    def __init__(self, hint: str) -> None:
        super().__init__()
        self.hint = hint


def json_option(function: F) -> F:
    """Add `--json`: the result as one JSON object on standard output, progress as JSON lines."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(
        function
    )


def debug_option(function: F) -> F:
    """Add `--debug` after the verb too; `tierwise.cli.main` reads it from the arguments."""
    return click.option(
        "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."
    )(function)


def print_result(result: Mapping[str, object], *, as_json: bool, text: str | None = None) -> None:
    """Print a verb's record: one JSON object, or `text`, or `key  value` lines."""
    if as_json:
        click.echo(json.dumps(result, allow_nan=False, default=str))
    elif text is not None:
        click.echo(text)
    else:
        width = max((len(key) for key in result), default=0)
        for key, value in result.items():
            click.echo(f"{key.replace('_', ' '):<{width}}  {value}")
