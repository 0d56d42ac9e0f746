"""What a pile of discs tells of an archive: its images, arrays and the last state of each inode.

Every image carries the state of each inode it knew of, with a sequence number; of several states
the last wins, and a tombstone is a state too. What an image of a lost disc carried comes back
when its array can rebuild it. Left out: writing it down (`rebuild`).
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierwise.archive.array_map import ArrayMap
from tierwise.archive.discs import DiscScan, open_image, scan_discs
from tierwise.archive.journal import Journalled
from tierwise.archive.library import enter_disc
from tierwise.archive.parity import find_damage, reconstruct
from tierwise.archive.plans import image_id
from tierwise.archive.shelf import Shelf
from tierwise.archive.slices import Record, check_record
from tierwise.archive.store import Store
from tierwise.core.errors import DataError, StateError, TierwiseError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import whole_file, write_whole


@dataclass(slots=True)
class FoundImage:
    """One image as the discs tell of it."""

    label: str
    image_id: str
    sequence: int
    array: int
    position: int
    kind: str
    size: int = 0
    sha256: str = ""
    created_ns: int = 0
    slot: int | None = None
    path: Path | None = None  # None: gone
    rebuilt: bool = False
    buffered: bool = False  # a copy is in the buffer, beside the disc or instead of it
    scan: DiscScan | None = None


@dataclass(slots=True)
class Found:
    """Everything the discs tell."""

    archive_id: str
    images: dict[str, FoundImage] = field(default_factory=dict)  # by image_id
    arrays: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # number: id, k, m
    maps: dict[int, ArrayMap] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)  # by inode, the last
    archive: Record = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)


class Computed:
    """Which images in the buffer a rebuild has put there, in case it is cut off.

    Args:
        path: The note's file, one label a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._labels = set(path.read_text("ascii").splitlines()) if path.exists() else set()

    def __contains__(self, label: str) -> bool:
        return label in self._labels

    def note(self, label: str) -> None:
        """Note an image, durably, before it is made."""
        self._labels.add(label)
        write_whole(self._path, "".join(f"{label}\n" for label in sorted(self._labels)))

    def forget(self) -> None:
        """Drop the note: the catalogue says it now."""
        self._path.unlink(missing_ok=True)


class DiscReader:
    """Reads discs and rebuilds lost images from the rest of their arrays.

    Args:
        store: The buffer, where rebuilt images go.
        shelf: The archive's disc library, if it has one.
        computed: The images that an earlier run, cut off, has put into the buffer.
        crash_point: Called between steps with their names; tests die there.
    """

    def __init__(
        self, store: Store, shelf: Shelf | None = None, *, computed: Computed,
        crash_point: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._store, self._shelf = store, shelf
        self._computed, self._crash_point = computed, crash_point

    def read(
        self, discs: dict[Path, int | None], progress: Progress = SILENT,
        journal: Journalled | None = None, *, archive_id: str | None = None,
    ) -> Found:  # fmt: skip
        """Return what discs and the buffer's journal tell.

        Args:
            discs: Images or disc files, each with its slot in the library, if it has one.
            progress: Counts discs.
            journal: States that no disc need know, and whose buffer it is.
            archive_id: The archive's, where that is known; then a journal will do.

        Raises:
            DataError: None of them is a disc of an archive.
            StateError: The buffer is another archive's.
        """
        journal = journal or Journalled()
        scans = []
        with progress.task("scan discs", len(discs)) as task:
            opener = open_image if self._shelf is None else self._shelf.opener(discs)
            for scan in scan_discs(discs, opener=opener):
                scans.append(scan)
                task.advance()
        known = [scan for scan in scans if scan.identity is not None]
        ids = [scan.identity.archive_id for scan in known if scan.identity is not None]
        if not ids and archive_id is not None and journal.of(archive_id):
            ids = [archive_id]
        if not ids:
            raise DataError("none of these is a disc of an archive", hint="name other discs")
        found = Found(max(set(ids), key=lambda name: (ids.count(name), name)))
        if journal.owner not in (None, found.archive_id):
            raise StateError(
                f"{self._store.files.parent} is the buffer of archive {journal.owner}, the discs"
                f" are of {found.archive_id}",
                hint="move the buffer away to rebuild from the discs alone",
            )
        for scan in scans:
            self._enter(found, scan, discs[scan.path])
        self._crash_point("rebuild: discs read")
        for number in found.maps:
            self._rebuild_array(found, number)
            self._crash_point("rebuild: array made whole")
        for image in found.images.values():
            if image.scan is not None:
                self._merge(found, image.scan)
            if image.path is not None and image.slot is None and not image.buffered:
                self._computed.note(image.label)
                with whole_file(self._store.image_path(image.label)) as copy:
                    shutil.copyfile(image.path, copy)
                image.buffered = image.rebuilt = True
        for record in journal.of(found.archive_id):
            _keep_last(found, record | {"journal": True}, journal.where)
        found.faults += journal.faults_for(found.archive_id)
        return found

    def _enter(self, found: Found, scan: DiscScan, slot: int | None) -> None:
        identity = scan.identity
        if identity is None or identity.archive_id != found.archive_id:
            other = "a disc of another archive" if identity else scan.detail or str(scan.fault)
            found.faults.append((str(scan.path), other))
            return
        if not _fits(found.archive_id, scan):
            found.faults.append((str(scan.path), f"{identity.label}: no archive made these ids"))
            return
        buffered = scan.path.parent == self._store.images
        known = found.images.get(identity.image_id)
        if known is not None and buffered and scan.sha256 == known.sha256:
            known.buffered = True
            known.rebuilt |= known.slot is None and identity.label in self._computed
            return
        if scan.fault is not None:
            found.faults.append((str(scan.path), f"{identity.label}: {scan.fault}: {scan.detail}"))
        if known is not None and (known.scan is None or known.scan.fault is None):
            found.faults.append((str(scan.path), f"{identity.label}: there twice, one is used"))
            return
        array, position = parse_label(identity.label)
        found.images[identity.image_id] = FoundImage(
            label=identity.label, image_id=identity.image_id, sequence=identity.sequence,
            array=array, position=position, kind="data" if scan.array_map is None else "parity",
            slot=slot, path=scan.path, scan=scan, size=scan.size_bytes, sha256=scan.sha256,
            created_ns=scan.created_ns, buffered=buffered,
            rebuilt=buffered and identity.label in self._computed,
        )  # fmt: skip
        if scan.array_map is not None:
            members = scan.array_map
            found.maps.setdefault(array, members)
            found.arrays[array] = (members.array_id, members.data_count, members.parity_count)
        elif scan.array is not None:
            place = scan.array
            found.arrays.setdefault(array, (place.array_id, place.data_count, place.parity_count))

    def _rebuild_array(self, found: Found, number: int) -> None:
        """Enter an array's members that are gone, and make those anew that can be."""
        with contextlib.ExitStack() as stack:
            self._rebuild_missing(found, number, stack)

    def _enter_members(self, found: Found, number: int) -> Iterator[tuple[int, FoundImage]]:
        """Yield an array's members by index, entering those that are gone."""
        for member in found.maps[number].members:
            image = found.images.setdefault(
                member.image_id,
                FoundImage(
                    label=member.label, image_id=member.image_id, sequence=member.sequence,
                    array=number, position=member.index, kind=member.role,
                ),
            )  # fmt: skip
            if member.role == "data":
                image.size, image.sha256 = member.length, member.sha256
            yield member.index, image

    def _rebuild_missing(self, found: Found, number: int, stack: contextlib.ExitStack) -> None:
        members, images = found.maps[number], dict(self._enter_members(found, number))
        if all(image.path and image.scan and not image.scan.fault for image in images.values()):
            return
        present: dict[int, Path] = {}
        missing: dict[int, Path] = {}
        for index, image in images.items():
            path = self._readable(image, stack)
            if path is None:
                missing[index] = self._store.image_path(image.label)
            else:
                present[index] = path
        damage = find_damage(members, present)
        for index in (index for index, blocks in damage.items() if blocks):
            missing[index] = self._store.image_path(images[index].label)
            found.faults.append((str(images[index].path), f"{images[index].label}: damaged"))
        for index in missing:
            self._computed.note(images[index].label)
        with contextlib.suppress(TierwiseError):
            reconstruct(members, present, missing, damage=damage)
        for index, path in missing.items():
            if path.exists():
                self._enter_rebuilt(images[index], path)

    def _enter_rebuilt(self, image: FoundImage, path: Path) -> None:
        image.path, image.slot, image.rebuilt = path, None, True
        image.scan = next(iter(scan_discs([path])))
        image.buffered, image.created_ns = True, image.scan.created_ns
        image.size, image.sha256 = image.scan.size_bytes, image.scan.sha256
        if image.scan.identity is not None:
            image.sequence = image.scan.identity.sequence

    def _readable(self, image: FoundImage, stack: contextlib.ExitStack) -> Path | None:
        if image.slot is None or self._shelf is None:
            return image.path
        return enter_disc(stack, self._shelf.readable(image.slot))

    def _merge(self, found: Found, scan: DiscScan) -> None:
        for record in scan.records:
            if record.get("record") == "archive":
                if _sound_counters(record) and record["seq"] >= found.archive.get("seq", -1):
                    found.archive = dict(record)
            else:
                _keep_last(found, record, str(scan.path))


def _fits(archive_id: str, scan: DiscScan) -> bool:
    """Return whether a disc's label, ids and array are such as the archive gives."""
    named = [(scan.identity.label, scan.identity.image_id)] if scan.identity else []
    members = () if scan.array_map is None else scan.array_map.members
    named += [(member.label, member.image_id) for member in members]
    try:
        places = [parse_label(label) for label, _ in named]
    except DataError:
        return False
    return all(image_id(archive_id, label) == given for label, given in named) and places[1:] == [
        (places[0][0], member.index) for member in members
    ]


def _sound_counters(record: Mapping[str, Any]) -> bool:
    counters = [record.get(name) for name in ("seq", "last_inode", "last_version")]
    return all(isinstance(n, int) and 0 <= n < 1 << 62 for n in counters)


def _keep_last(found: Found, record: Mapping[str, Any], where: str) -> None:
    """Keep a record of an inode's state unless a later one is known, or it is impossible."""
    if record.get("record") in ("inode", "tombstone", "forgotten"):
        try:
            check_record(record)
        except DataError as error:
            found.faults.append((where, f"the record of inode {record.get('inode')}: {error}"))
            return
        ino = int(record["inode"])
        if ino not in found.records or int(record["seq"]) > int(found.records[ino]["seq"]):
            found.records[ino] = dict(record)


def parse_label(label: str) -> tuple[int, int]:
    """Return (array, position) of an image's label.

    >>> parse_label("TW_01234567_A00003_P011")
    (3, 11)
    """
    match = re.fullmatch(r"TW_[0-9A-F]{8}_A(\d+)_[DP](\d+)", label)
    if match is None:
        raise DataError(f"{label!r} is not the label of an archive's disc")
    return int(match[1]), int(match[2])
