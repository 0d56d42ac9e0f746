"""Step 5: everything the run found, as one page, and what each claim rests on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tierwise.cli.demo.cost import cost_sections
from tierwise.cli.demo.keep import keep_section
from tierwise.cli.demo.settings import DemoSettings
from tierwise.cli.demo.study import study_section
from tierwise.cli.demo.training import timelines
from tierwise.cli.steps import StepContext
from tierwise.core.records import RunRecord
from tierwise.core.report import Report, Section, Table, Text, write_report
from tierwise.core.units import format_usd
from tierwise.curriculum.training.evaluate import Decoding, Difference, differences, read_scores
from tierwise.curriculum.training.training_figures import training_section


def run_page(context: StepContext, settings: DemoSettings) -> dict[str, object]:
    """Write report.html, report.md and the figures; return the summary."""
    events = {event["event"]: event for event in context.record.events()}
    found = _differences(context, settings)
    summary = _summary(events, found, settings)
    report = Report(
        title="tierwise demo: which data goes where, and when?",
        summary=tuple(summary),
        sections=(
            _claims(events, settings),
            study_section(context, settings),
            _training_section(context, found),
            _offload_section(context, settings),
            keep_section(context),
            *cost_sections(context, settings.cost, settings.seed),
        ),
    )
    write_report(report, context.run_folder)
    return dict(summary)


def _differences(context: StepContext, settings: DemoSettings) -> tuple[Difference, ...]:
    folder = context.run_folder / "2-offload"
    before, after = (read_scores(folder / f"examined-{name}.jsonl") for name in ("before", "after"))
    return differences(before, after, seed=settings.seed)


def _summary(
    events: dict[str, Any], found: Sequence[Difference], settings: DemoSettings
) -> list[tuple[str, str]]:
    scored, proof, kept = (
        events["curriculum.scored"], events["offload.compared"], events["archive.read_back"]
    )  # fmt: skip
    strata = scored["pism_strata"]
    sampled = next(d for d in found if d.group == "all" and d.decoding is Decoding.SAMPLED)
    greedy = next(d for d in found if d.group == "all" and d.decoding is Decoding.GREEDY)
    cost = events["tco.compared"]  # the last one: the scaled archive
    best = cost["ranking"][0]
    bits = "equal plain AdamW's" if proof["bits_equal"] else "DIFFER from plain AdamW's"
    return [
        (
            f"medium and hard of {scored['num_samples']} samples (PISM)",
            str(strata.get("medium", 0) + strata.get("hard", 0)),
        ),
        *(_change(found) for found in (sampled, greedy)),
        (f"bits after {proof['steps']} overlapped steps", bits),
        (
            f"files intact with {kept['num_discs_destroyed']} disc destroyed",
            f"{kept['num_intact']} of {kept['num_files']}",
        ),
        (
            f"{settings.cost.scaled_to} for {cost['years']} years, least of {len(cost['ranking'])}",
            f"{best}, {format_usd(cost['endowment_usd'][best])}",
        ),
    ]


def _change(found: Difference) -> tuple[str, str]:
    change, low, high = (100 * x for x in (found.difference, found.low, found.high))
    interval = f"{change:+.1f} points [{low:+.1f}, {high:+.1f}]: {found.verdict}"
    label = f"{found.decoding.value} accuracy, {found.num_samples} held-out questions; {interval}"
    return label, f"{100 * found.before:.1f} % -> {100 * found.after:.1f} %"


def _claims(events: dict[str, Any], settings: DemoSettings) -> Section:
    scored, proof, kept = (
        events["curriculum.scored"], events["offload.compared"], events["archive.read_back"]
    )  # fmt: skip
    rows = (
        (
            "strata",
            f"{scored['num_attempts']:,} real answers of the shipped model; pass rates with Wilson "
            "intervals; masks and draws seeded by sample, share and repetition",
            "1-curriculum/attempts.sqlite",
        ),
        (
            "accuracy before and after",
            f"{settings.data.num_held_out} held-out questions (digits never trained on), the same "
            "questions and seeds on both sides; bootstrap over questions",
            "2-offload/examined-before.jsonl, examined-after.jsonl",
        ),
        (
            "bits equal",
            f"the training run done twice, {proof['steps']} steps; SHA-256 of all weights, of both "
            "moments and of every step's gradient norm",
            "2-offload/proof.json",
        ),
        (
            "files intact",
            f"written through {kept['written_through']}; SHA-256 of each of "
            f"{kept['num_files']} files before burning and after a disc was destroyed",
            "3-archive/hashes.json",
        ),
        (
            "cost",
            "every cash flow is a row with its cause; every input has a source and a range",
            "4-tco/*/ledger.csv, assumptions.csv",
        ),
    )
    return Section(
        title="What each claim rests on",
        blocks=(
            Table(caption="Claims", header=("claim", "rests on", "file in the run"), rows=rows),
            Text(
                text="The model is tiny, the disc library and its robot are simulated (a folder "
                "of write-once disc images and a virtual clock), and one seed is no study: this "
                "page shows that each part works, not how large its effect is elsewhere."
            ),
        ),
    )


def _training_section(context: StepContext, found: Sequence[Difference]) -> Section:
    record = RunRecord(context.run_folder / "2-offload" / "overlapped", clock=float)
    metrics = [event for event in record.events() if event["event"] == "step"]
    return training_section(metrics, found, title="Did it help")


def _offload_section(context: StepContext, settings: DemoSettings) -> Section:
    folder = context.run_folder / "2-offload"
    overlap = json.loads((folder / "overlap.json").read_text())
    counts = json.loads((folder / "counts.json").read_text())
    proof = json.loads((folder / "proof.json").read_text())
    computed = counts["kept"] + counts["redone"]
    hidden = overlap["hidden_s"] / overlap["update_s"] if overlap["update_s"] else 0.0
    rows = (
        ("parameters", f"{counts['num_parameters']:,}"),
        ("steps", f"{counts['steps']}, of which clipped {counts['clipped']}"),
        (
            "updates made during backward and kept",
            f"{counts['kept']} of {computed} (the rest were made again after clipping)",
        ),
        ("update time on the second thread", f"{overlap['update_s'] * 1000:.1f} ms"),
        ("of it beside forward or backward", f"{hidden:.0%}"),
        ("the training thread waited", f"{overlap['exposed_s'] * 1000:.1f} ms"),
        ("weights, overlapped", proof["weights_sha256"]),
        ("weights, plain AdamW", proof["plain_weights_sha256"]),
        ("weights and moments", "equal bit for bit" if proof["bits_equal"] else "DIFFERENT"),
        ("gradient norms", "equal" if proof["grad_norms_equal"] else "DIFFERENT"),
    )
    return Section(
        title="Which device",
        blocks=(
            Text(
                text="The optimizer updates parameters block by block on a second thread while "
                "backward goes on, into shadow buffers; step() keeps them, or makes them again "
                "with the true coefficient when the gradient has to be clipped. Here both "
                "threads share one CPU, so the picture shows the order of work, not a speed-up."
            ),
            *timelines(folder),
            Table(caption="The overlapped run", header=("what", "measured"), rows=rows),
        ),
    )
