"""`tierwise demo`: the four capabilities end to end on real data, ending with one report.

```
 0-data  ->  1-curriculum  ->  2-offload  ->  3-archive  ->  4-tco  ->  5-report
 draw        score, select     train, prove   burn, lose     50 years   one page
```

Each step leaves files that the next one reads (docs/formats/run.md); an interrupted demo goes on
where it stopped.
"""

from __future__ import annotations

from pathlib import Path

import click

from tierwise.cli.options import debug_option, json_option, print_result


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=True),
    default=Path("runs/demo"),
    show_default=True,
    help="The run's folder.",
)
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Seed of everything drawn.")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), default=None,
    help="TOML file with other settings.",
)  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting.")
@json_option
@debug_option
def demo(
    out: Path,
    seed: int | None,
    config_path: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """All four, end to end, on real data, in minutes.

    Scores how hard questions about pictures are for a tiny vision-language model, post-trains it
    on the medium and hard ones with an overlapped optimizer, keeps everything on simulated discs,
    destroys one and reads all back, and costs 50 years of keeping it. An interrupted run goes on
    where it stopped; a finished one is done again.
    """
    from tierwise.core.config import load_config, parse_config
    from tierwise.core.extras import EXTRA_MODULES, require_extra
    from tierwise.core.progress import choose_progress

    for extra in EXTRA_MODULES:
        require_extra(extra)
    from tierwise.cli.demo.run import run_demo
    from tierwise.cli.demo.settings import DemoSettings

    changes = [*overrides, *([] if seed is None else [f"seed={seed}"])]
    if config_path is None:
        settings = parse_config(DemoSettings, "", overrides=changes)
    else:
        settings = load_config(DemoSettings, config_path, changes)
    result = run_demo(out, settings, progress=choose_progress(as_json=as_json))
    print_result(result, as_json=as_json)
