"""`tierwise offload`: parse, call one function of `tierwise.offload`, print its records."""

from __future__ import annotations

from pathlib import Path

import click

from tierwise.cli.options import debug_option, json_option, print_result


@click.group()
def group() -> None:
    """Which device: update on the CPU while backward runs."""


@group.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@json_option
@debug_option
def plan(config: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say whether a model trains on a card, how fast, and what stays where; no GPU is needed.

    CONFIG is a TOML file (docs/offload.md has the keys); without one, --set says it all:
    tierwise offload plan --set model=qwen2.5-7b --set machine=rtx4090-24gb --set tokens=16384
    """
    from tierwise.core.config import load_config, parse_config
    from tierwise.offload.ask import PlanConfig, answer, as_record, as_text

    asked = (
        parse_config(PlanConfig, "", overrides=overrides, name="--set")
        if config is None
        else load_config(PlanConfig, config, overrides)
    )
    found = answer(asked)
    print_result(as_record(found), as_json=as_json, text=as_text(found))


@group.command()
@json_option
@debug_option
def machines(as_json: bool) -> None:
    """List the models and machines that `plan` knows by name."""
    from tierwise.offload.workload import names_of

    known = {"models": names_of("model"), "machines": names_of("machine")}
    text = "\n".join(f"{kind:<9} {', '.join(names)}" for kind, names in known.items())
    print_result(known, as_json=as_json, text=text)
