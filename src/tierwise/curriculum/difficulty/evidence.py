"""What to look at beside the numbers: pictures of samples, and what the reward gets wrong.

Samples masked where the model stops answering, those that it answers without looking, those that
are there twice, and the audit of our own reward on the data's answers. Left out: the drawings and
tables of difficulty, which are `figures`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierwise.core.report import Block, Gallery, Section, Table, Text
from tierwise.curriculum.audit import Audit, audit_reward, load_reward
from tierwise.curriculum.difficulty.masks import mask_picture
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.difficulty.probes import Masking, mask_seed
from tierwise.curriculum.difficulty.scores import Score
from tierwise.curriculum.duplicates import Duplicates
from tierwise.curriculum.samples import BadImageError, Sample, load_image

if TYPE_CHECKING:
    from PIL import Image

_SHOWN_SIDE = 144
_MOST_SHOWN = 6


def looking_section(rows: Sequence[Score], samples: Sequence[Sample], found: Duplicates) -> Section:
    """Return pictures of what is answered without looking, and of what is there twice."""
    by_id = {sample.id: sample for sample in samples}
    asked = [row for row in rows if row.blind_rate is not None or row.grey_rate is not None]
    blind = [row for row in asked if row.blind_answerable and row.id in by_id]
    groups = (*found.exact, *found.near)
    blocks: list[Block] = [
        Text(
            text=f"{len(blind)} of {len(asked)} samples are answered without looking at the "
            "picture; such a question teaches nothing about looking."
            if asked
            else "Whether samples are answered without looking was not measured."
        ),
        *_shown(blind_gallery(blind, samples)),
        Text(
            text=f"Among {len(samples)} samples, groups of exact duplicates: {len(found.exact)}; "
            f"groups that show nearly the same picture under the same question: {len(found.near)}."
        ),
    ]
    if groups:
        blocks += _shown(duplicates_gallery(found, samples))
    return Section(title="Answered blind, and there twice", blocks=tuple(blocks))


def _shown(one: Gallery) -> tuple[Gallery, ...]:
    return (one,) if one.pictures else ()


def blind_gallery(rows: Sequence[Score], samples: Sequence[Sample]) -> Gallery:
    """Return pictures of samples that are answered blind, with the rates, most often first."""
    by_id = {sample.id: sample for sample in samples}

    def rate(row: Score) -> float:
        return max(row.grey_rate or 0.0, row.blind_rate or 0.0)

    pictures: list[tuple[bytes, str]] = []
    for row in sorted(rows, key=lambda row: (-rate(row), row.id)):
        picture = _plain(by_id[row.id])
        if picture is not None and len(pictures) < _MOST_SHOWN:
            note = f"grey {_share(row.grey_rate)}, no picture {_share(row.blind_rate)}"
            sample = by_id[row.id]
            pictures.append((picture, f"{note}: {sample.question} -> {sample.answer}"))
    return Gallery(
        caption=f"Answered without looking: up to {_MOST_SHOWN}, the surest first, with the share "
        "of right answers to a grey picture and to none.",
        pictures=tuple(pictures),
    )


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2f}"


def duplicates_gallery(found: Duplicates, samples: Sequence[Sample]) -> Gallery:
    """Return pictures of the first groups of duplicates, members side by side."""
    by_id = {sample.id: sample for sample in samples}
    kinds = [("exact", group) for group in found.exact] + [("near", group) for group in found.near]
    pictures: list[tuple[bytes, str]] = []
    for number, (kind, group) in enumerate(kinds[: _MOST_SHOWN // 2], start=1):
        for identity in group[:2]:
            picture = _plain(by_id[identity])
            if picture is not None:
                pictures.append((picture, f"group {number}, {kind}: {identity}"))
    return Gallery(
        caption=f"The first groups of duplicates, two of each, of {len(kinds)}.",
        pictures=tuple(pictures),
    )


def audit_section(samples: Sequence[Sample], *, seed: int) -> Section:
    """Return what our own reward gets wrong on probes made from the data's answers.

    Args:
        samples: Their answers are probed, at most 200 of them.
        seed: Of the choice among them, and of near misses.
    """
    return Section(
        title="Audit of the reward",
        blocks=audit_blocks(audit_reward(load_reward("ours"), samples, seed=seed)),
    )


def audit_blocks(found: Audit) -> tuple[Block, ...]:
    """Return an audit as a sentence, a table of classes, and examples of what went wrong."""
    tried = sum(found.num_probes.values())
    blocks: list[Block] = [
        Text(
            text=f"Of {tried:,} completions whose right verdict is known, made from the data's "
            f"answers and from built-in ones, the reward judged {len(found.findings):,} wrongly."
        ),
        Table(
            caption="Probes tried and judged wrongly, by class of fault",
            header=("class", "probes", "wrong"),
            rows=tuple(
                (fault.value.replace("_", " "), f"{count:,}", f"{found.num_wrong(fault):,}")
                for fault, count in found.num_probes.items()
            ),
        ),
    ]
    if found.findings:
        blocks.append(
            Table(
                caption="An example of each class",
                header=("class", "what", "right answer", "completion", "score"),
                rows=tuple(
                    (
                        one.probe.fault.value.replace("_", " "),
                        one.kind,
                        one.probe.gold,
                        _short(one.probe.completion),
                        one.error or f"{one.score}",
                    )
                    for one in found.examples()
                ),
            )
        )
    return tuple(blocks)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def gallery(
    rows: Sequence[Score],
    samples: Sequence[Sample],
    *,
    masking: Masking,
    seed: int,
    num_each: int = 3,
) -> Gallery:
    """Return a few samples of each stratum, masked as at their failure threshold."""
    by_id = {sample.id: sample for sample in samples}
    pictures: list[tuple[bytes, str]] = []
    for one in (Stratum.EASY, Stratum.MEDIUM, Stratum.HARD, Stratum.UNSOLVED):
        shown = 0
        for row in sorted(rows, key=lambda row: (-row.stratum_confidence, row.id)):
            if row.pism_stratum is not one or shown == num_each or row.id not in by_id:
                continue
            picture = _at_threshold(by_id[row.id], row, masking, seed)
            if picture is not None:
                pictures.append((picture, _note(by_id[row.id], row)))
                shown += 1
    return Gallery(
        caption="Samples masked as where the model stops answering (their lambda*); easy ones "
        "that never fail are shown at the heaviest mask.",
        pictures=tuple(pictures),
    )


def _note(sample: Sample, row: Score) -> str:
    star = "never" if row.lambda_star is None else f"{row.lambda_star:.1f}"
    return f"{row.pism_stratum.value}, lambda* {star}: {sample.question} -> {sample.answer}"


def _at_threshold(sample: Sample, row: Score, masking: Masking, seed: int) -> bytes | None:
    import numpy as np
    from PIL import Image as PIL_Image

    if not sample.images:
        return None
    try:
        pixels = np.asarray(load_image(sample.images[0]))
    except BadImageError:
        return None
    heaviest = max(row.curve_permilles, default=0)
    permille = heaviest if row.lambda_star is None else round(1000 * row.lambda_star)
    masked = mask_picture(
        pixels,
        permille=permille,
        seed=mask_seed(sample.id, permille=permille, k=0, seed=seed),
        kind=masking.kind,
        fill=masking.fill,
        patch_side=masking.patch_side,
    )
    return _png(PIL_Image.fromarray(masked))


def _plain(sample: Sample) -> bytes | None:
    """Return a sample's first picture as it is, or None where there is none to read."""
    if not sample.images:
        return None
    try:
        return _png(load_image(sample.images[0]))
    except BadImageError:
        return None


def _png(picture: Image.Image) -> bytes:
    from PIL import Image as PIL_Image

    scale = _SHOWN_SIDE / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    method = PIL_Image.Resampling.NEAREST if scale > 1 else PIL_Image.Resampling.LANCZOS
    buffer = io.BytesIO()
    picture.resize(size, method).save(buffer, format="PNG")
    return buffer.getvalue()
