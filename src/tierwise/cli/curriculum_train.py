"""`tierwise curriculum train` and `study`: parse, call one function, print its records."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from tierwise.cli.options import debug_option, json_option, print_result

if TYPE_CHECKING:
    import torch

    from tierwise.curriculum.training.recipe import OptimizerConfig


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="One setting.")
@json_option
@debug_option
def train(*, config: Path, out: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Train as CONFIG says; the same command goes on with a run that was stopped."""
    from tierwise.core.extras import require_extra

    require_extra("curriculum")
    from tierwise.core.config import load_config
    from tierwise.core.progress import choose_progress
    from tierwise.curriculum.training.recipe import RecipeConfig, is_first_process, run_recipe

    recipe = load_config(RecipeConfig, config, overrides)
    with stop_on_signal() as stop:
        result = run_recipe(
            recipe,
            base=config.parent,
            folder=out,
            make_optimizer=make_optimizer,
            progress=choose_progress(as_json=as_json),
            stop=stop,
        )
    if not result.finished:
        raise KeyboardInterrupt
    if not is_first_process():
        return
    record: dict[str, object] = {"model": str(result.model_folder), "report": str(result.report)}
    record |= {f"{name}_steps": stage.steps for name, stage in result.stages.items()}
    for change in result.changes:
        if change.group == "all":
            name = change.decoding.value
            record |= {
                f"{name}_before": round(change.before, 4),
                f"{name}_after": round(change.after, 4),
                f"{name}_interval": [round(change.low, 4), round(change.high, 4)],
                f"{name}_reads": change.verdict,
            }
    print_result(record, as_json=as_json)


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the study.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="One setting.")
@click.option("--dry-run", is_flag=True, help="Say what it would take, and stop.")
@json_option
@debug_option
def study(
    *, config: Path, out: Path, overrides: tuple[str, ...], dry_run: bool, as_json: bool
) -> None:
    """Train every arm of CONFIG under several seeds and compare them; the same command goes on.

    Start it again in another terminal to work on other runs of the same study.
    """
    from tierwise.core.extras import require_extra

    require_extra("curriculum")
    from tierwise.core.config import dump_config, load_config
    from tierwise.core.progress import choose_progress
    from tierwise.core.records import write_whole
    from tierwise.core.report import write_report
    from tierwise.curriculum.experiment.price import price
    from tierwise.curriculum.experiment.study import StudyConfig, cells_of, read_rates, run_study
    from tierwise.curriculum.experiment.study_analysis import analyse
    from tierwise.curriculum.samples import read_samples

    settings = load_config(StudyConfig, config, overrides)
    if dry_run:
        asked = {
            name: len(read_samples(path).samples)
            for name, file in (("held_out", settings.held_out), ("validation", settings.validation))
            if file and (path := config.parent / file).exists()
        }
        told: dict[str, object] = {f"{name}_samples": number for name, number in asked.items()}
        told |= price(
            settings, num_held_out=asked.get("held_out"), num_validation=asked.get("validation")
        )
        print_result(told, as_json=as_json)
        return
    with stop_on_signal() as stop:
        cells = run_study(
            settings,
            base=config.parent,
            folder=out,
            make_optimizer=make_optimizer,
            progress=choose_progress(as_json=as_json),
            stop=stop,
        )
        if stop():
            raise KeyboardInterrupt
    from tierwise.curriculum.experiment.study_report import study_report

    write_whole(out / "config.toml", dump_config(settings))
    rates = read_rates(settings, out)
    page = write_report(study_report(settings, cells, rates), out)
    record: dict[str, object] = {
        "report": str(page),
        "runs_done": len(cells),
        "runs_planned": len(cells_of(settings)),
    }
    for tuned in rates:
        record[f"{tuned.arm} rate"] = (
            f"{tuned.rate:g} of {len(tuned.tried)}, {tuned.num_runs} run(s) each"
        )
    for one in analyse(cells, settings.control).comparisons:
        record[f"{one.arm} - {one.control} {one.decoding.value}"] = (
            f"{one.difference:+.4f} [{one.wide_low:+.4f}, {one.wide_high:+.4f}] {one.verdict}"
        )
    print_result(record, as_json=as_json)


def make_optimizer(
    module: torch.nn.Module, settings: OptimizerConfig, max_grad_norm: float
) -> torch.optim.Optimizer:
    """Return AdamW over a module's trainable parameters, on the GPU's side or offloaded."""
    betas = (settings.beta1, settings.beta2)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if settings.offload:
        from tierwise.core.extras import require_extra

        require_extra("offload")
        from tierwise.offload import OffloadAdamW

        return OffloadAdamW(
            trained,
            model=module,
            lr=settings.lr,
            betas=betas,
            weight_decay=settings.weight_decay,
            max_grad_norm=max_grad_norm or None,
            nonfinite="skip",
        )
    from torch.optim import AdamW

    return AdamW(
        trained, lr=settings.lr, betas=betas, weight_decay=settings.weight_decay, fused=True
    )


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that is True once Ctrl-C or SIGTERM came; the second one interrupts."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        click.echo("stopping after this step or evaluation; again to stop now", err=True)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
