"""Fixity: every disc read whole, oldest check first; what fails is made anew from its array.

Both can be cut off and go on where they were: a check is a time in the catalogue, a repair is an
image that has a good disc again. Left out: a schedule; cron or a systemd timer has that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierwise.archive.burn import Burner
from tierwise.archive.catalogue import Catalogue
from tierwise.archive.mend import Mender
from tierwise.archive.shelf import SWAPPED, Shelf
from tierwise.core.errors import IntegrityError
from tierwise.core.progress import SILENT, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubReport:
    """Discs that were read, and (label, slot, what is wrong) of those that failed."""

    checked: int
    failed: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """Labels of images that have a good disc again, and (label, why) of those beyond repair."""

    repaired: tuple[str, ...]
    beyond: tuple[tuple[str, str], ...]


def scrub(
    catalogue: Catalogue,
    shelf: Shelf,
    *,
    older_than_ns: int | None = None,
    max_discs: int | None = None,
    progress: Progress = SILENT,
    crash_point: Callable[[str], None] = lambda name: None,
) -> ScrubReport:
    """Read discs whole and compare their hashes.

    Args:
        catalogue: The open catalogue.
        shelf: The disc library.
        older_than_ns: Only discs last verified before this time; None: all. A disc verified in
            the future (the clock was set back) counts as never verified.
        max_discs: Stop after so many.
        progress: Counts discs.
        crash_point: Called after each disc; tests die there.
    """
    rows = catalogue.all(
        "SELECT slot, label, size, sha256 FROM discs JOIN images USING (image)"
        " WHERE discs.state <> 'lost' AND (?1 IS NULL OR verified_ns < ?1 OR verified_ns > ?2)"
        " ORDER BY verified_ns > ?2 DESC, verified_ns, slot LIMIT ?3",
        older_than_ns, catalogue.clock(), -1 if max_discs is None else max_discs,
    )  # fmt: skip
    failed: list[tuple[str, int, str]] = []
    with progress.task("scrub", len(rows)) as task:
        for slot, label, size, sha256 in rows:
            fault = shelf.fault(slot, label, size, sha256)
            with catalogue.transaction():
                catalogue.run(
                    "UPDATE discs SET state = ?, verified_ns = ? WHERE slot = ?",
                    "suspect" if fault else "good", catalogue.clock(), slot,
                )  # fmt: skip
                outcome = "failure" if fault else "success"
                catalogue.event("fixity check", label, outcome, fault or f"slot {slot}")
            if fault:
                failed.append((label, slot, fault))
            crash_point("scrub: disc checked")
            task.advance()
    for _, slot, fault in failed:
        if fault.startswith(SWAPPED):
            _enter_swapped(catalogue, shelf, slot, fault.removeprefix(SWAPPED))
    return ScrubReport(checked=len(rows), failed=tuple(failed))


def _enter_swapped(catalogue: Catalogue, shelf: Shelf, slot: int, label: str) -> None:
    """Enter a disc that stands in another's slot under the slot where it is."""
    row = catalogue.one("SELECT image, size, sha256 FROM images WHERE label = ?", label)
    if row is None or not shelf.holds(slot, row[1], row[2]):
        return
    now = catalogue.clock()
    with catalogue.transaction():
        catalogue.run(
            "INSERT OR REPLACE INTO discs VALUES (?, ?, 'good', ?, ?)", slot, row[0], now, now
        )
        catalogue.event("fixity check", label, "warning", f"found in slot {slot}, entered there")


def repair(
    catalogue: Catalogue,
    mender: Mender,
    burner: Burner,
    *,
    progress: Progress = SILENT,
    crash_point: Callable[[str], None] = lambda name: None,
) -> RepairReport:
    """Give every burned image without a good disc a new one, rebuilt from its array."""
    _give_up_replaced(catalogue)
    rows = catalogue.all(
        "SELECT image, label FROM images i WHERE state = 'burned' AND NOT EXISTS"
        " (SELECT 1 FROM discs d WHERE d.image = i.image AND d.state = 'good') ORDER BY image"
    )
    repaired, beyond = [], []
    with progress.task("repair", len(rows)) as task:
        for image, label in rows:
            try:
                mender.rebuild_image(image)
            except IntegrityError as error:
                beyond.append((label, str(error)))
                catalogue.event("recovery", label, "failure", str(error))
                continue
            crash_point("repair: image rebuilt")
            size, sha256 = _made(catalogue, image)
            slot = burner.burn_image(image, label, size, sha256)
            with catalogue.transaction():
                _give_up_replaced(catalogue)
                catalogue.event("recovery", label, detail=f"rebuilt, burned to slot {slot}")
            repaired.append(label)
            crash_point("repair: disc replaced")
            task.advance()
    return RepairReport(repaired=tuple(repaired), beyond=tuple(beyond))


def _give_up_replaced(catalogue: Catalogue) -> None:
    """Mark suspect discs lost whose image has a good disc: also those of a repair cut off."""
    catalogue.run(
        "UPDATE discs SET state = 'lost' WHERE state = 'suspect' AND image IN"
        " (SELECT image FROM discs WHERE state = 'good')"
    )


def _made(catalogue: Catalogue, image: int) -> tuple[int, str]:
    """Return size and hash of an image as rebuilt; parity made anew may have new ones."""
    row = catalogue.one("SELECT size, sha256 FROM images WHERE image = ?", image)
    assert row is not None
    return int(row[0]), str(row[1])
