"""Names kept beside the bytes: what no disc knows yet, so that a lost catalogue loses no name.

`buffer/journal.jsonl` gets, whenever something is made durable, one line for every inode changed
since: the record an image would carry (`slices`), with its unsealed contents too. The highest
sequence number of an inode wins, as on discs, so old lines do no harm; what was deleted before any
disc knew it is `forgotten`. Each batch says of which archive it is and each line carries its
CRC-32, so damage and strangers are noticed. Nothing is written between two syncs: creating a file
costs nothing. `buffer/README.txt` tells a person whose buffer it is and how to find a file in it.

Left out: changes never made durable; those are promised nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.slices import Record, check_record, inode_record, tombstone_record
from tierwise.core.errors import DataError, MissingFileError, StateError
from tierwise.core.records import write_whole

_COMPACT_BYTES = 64 << 20
_CRC = re.compile(r', "crc32": "([0-9a-f]{8})"\}$')

README = "README.txt"
_README = r"""This folder is the disk buffer of a tierwise archive.
Archive: {archive_id}

files/XX/N     one content each, whole, under its number N; XX is N modulo 256 in hex
images/*.iso   disc images on their way to discs; 7z x, bsdtar -x or mount -o loop opens them
journal.jsonl  the names of what is on no image yet, one JSON object a line

Which file is which, without tierwise: run this in this folder.

    sed -n 's/.*"path": "\(.*\)", "names".*"versions": \[.*\[\([0-9]*\), [^]]*\]\].*/\2 \1/p' \
      journal.jsonl |
    sed 's/\\"/"/g' |
    awk '{{ n = $1; sub(/^[0-9]+ /, ""); path[n] = $0 }}
      END {{ for (n in path) printf "files/%02x/%d  %s\n", n % 256, n, path[n] }}' |
    while read -r file path; do [ -e "$file" ] && printf '%s  %s\n' "$file" "$path"; done

In a path, %XX stands for the byte XX (hex), as %25 for a percent sign. A number that is not listed
is a copy of what is on an image already, where it has its full path; or nothing ever made its name
durable.
"""


def journal_path(root: Path) -> Path:
    """Return where an archive keeps its journal: in the buffer, not in the metadata volume."""
    return root / "buffer" / "journal.jsonl"


def sign_buffer(root: Path, archive_id: str) -> None:
    """Say in an archive's buffer whose it is, unless that is said already.

    Raises:
        MissingFileError: There is no buffer.
        StateError: It is another archive's.
    """
    if not (root / "buffer" / "files").is_dir():
        raise MissingFileError(
            f"{root} has lost its buffer",
            hint="put buffer/ back; if it is gone, move metadata/ away and rebuild from discs",
        )
    owner = buffer_owner(root)
    if owner is None:
        write_whole(root / "buffer" / README, _README.format(archive_id=archive_id))
    elif owner != archive_id:
        raise StateError(
            f"{root / 'buffer'} is the buffer of another archive, {owner}",
            hint="put the archive's own buffer back",
        )


def buffer_owner(root: Path) -> str | None:
    """Return the id of the archive a buffer says it belongs to, None where it does not say."""
    with contextlib.suppress(OSError):
        text = (root / "buffer" / README).read_text("ascii", errors="replace")
        found = re.search(r"^Archive: ([0-9a-f]{32})$", text, re.MULTILINE)
        return None if found is None else found[1]
    return None


@dataclass(slots=True)
class Journalled:
    """What a journal tells.

    Attributes:
        where: Its path, for messages.
        owner: The archive whose buffer it lies in, where that is known.
        records: Archive -> inode -> its last record.
        faults: (line, what is wrong).
    """

    where: str = ""
    owner: str | None = None
    records: dict[str, dict[int, Record]] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)

    def of(self, archive_id: str) -> Iterable[Record]:
        """Return the last record of each inode of an archive."""
        return self.records.get(archive_id, {}).values()

    def faults_for(self, archive_id: str) -> list[tuple[str, str]]:
        """Return what is wrong, for an archive: also that others' lines were passed over."""
        others = sum(len(found) for name, found in self.records.items() if name != archive_id)
        strange = [(self.where, f"{others} inodes of another archive")] if others else []
        return self.faults + strange


class Journal:
    """The journal of the one session that may write names.

    Args:
        path: Its file; made when needed.
        catalogue: The open catalogue, which notes what changes.
    """

    def __init__(self, path: Path, catalogue: Catalogue) -> None:
        self._path, self._catalogue = path, catalogue
        self._compacted_bytes = path.stat().st_size if path.exists() else 0

    def catch_up(self) -> None:
        """Note what an earlier session changed and did not journal: it was cut off."""
        last = self._catalogue.value("SELECT value FROM meta WHERE key = 'journalled'") or 0
        for table in ("inodes", "tombstones"):
            rows = self._catalogue.all(
                f"SELECT ino FROM {table} WHERE dirty = 1 AND seq > ?", int(last)
            )
            self._catalogue.touched.update(row[0] for row in rows)

    def write(self) -> None:
        """Return when the state of everything changed so far is in the journal, durably."""
        touched = self._catalogue.touched
        if not touched:
            return
        with self._catalogue.transaction():
            seq = self._catalogue.value("SELECT value FROM meta WHERE key = 'seq'")
            lines = self._lines((ino, seq) for ino in sorted(touched))
            self._catalogue.run("INSERT OR REPLACE INTO meta VALUES ('journalled', ?)", seq)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        is_new = not self._path.exists()
        descriptor = os.open(self._path, flags, 0o600)
        try:
            data = memoryview(("\n" + "".join(lines)).encode())
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if is_new:
            _sync_folder(self._path.parent)
        touched.clear()
        if size > max(_COMPACT_BYTES, 2 * self._compacted_bytes):
            self.compact()

    def compact(self) -> None:
        """Keep only what no image carries yet."""
        with self._catalogue.transaction():
            inodes = self._catalogue.all("SELECT ino FROM inodes WHERE dirty = 1")
            graves = self._catalogue.all("SELECT ino FROM tombstones WHERE dirty = 1")
            lines = self._lines((ino, 0) for (ino,) in (*inodes, *graves))
        write_whole(self._path, "".join(lines))
        self._compacted_bytes = self._path.stat().st_size

    def close(self) -> None:
        """Leave a short journal where everything is on images."""
        dirty = self._catalogue.value("SELECT EXISTS (SELECT 1 FROM inodes WHERE dirty = 1)")
        if not dirty and self._path.exists() and self._path.stat().st_size > 0:
            self.compact()

    def _lines(self, changed: Iterable[tuple[int, int]]) -> list[str]:
        """Return a batch's lines: whose they are, then one for each (inode, sequence number)."""
        lines = [_line(self._record(ino, seq)) for ino, seq in changed]
        owner = self._catalogue.value("SELECT value FROM meta WHERE key = 'archive_id'")
        return [_line({"record": "journal", "archive_id": owner}), *lines] if lines else []

    def _record(self, ino: int, seq: int) -> Record:
        if self._catalogue.one("SELECT 1 FROM inodes WHERE ino = ? AND nlink > 0", ino):
            return inode_record(self._catalogue, ino, unsealed=True)
        grave = self._catalogue.one(
            "SELECT ino, path, deleted_ns, seq FROM tombstones WHERE ino = ?", ino
        )
        if grave is not None:
            return tombstone_record(*grave)
        return {"record": "forgotten", "inode": ino, "seq": seq}


def _line(record: Record) -> str:
    """Return a record as a line; its CRC-32 is that of the line without the CRC.

    >>> _line({"record": "forgotten"}).rstrip()
    '{"record": "forgotten", "crc32": "4cf7e3f0"}'
    """
    text = json.dumps(record, ensure_ascii=False)
    return f'{text[:-1]}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'


def read_journal(root: Path) -> Journalled:
    """Return what an archive's journal tells; a last line that a crash tore is passed over."""
    path = journal_path(root)
    found = Journalled(where=str(path), owner=buffer_owner(root))
    if not path.exists():
        return found
    archive_id = found.owner or ""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as stream:
        for number, line in enumerate(stream, start=1):
            record = _record_of(line)
            if record is None:
                if line.endswith("\n") and line.strip():
                    found.faults.append((f"{path}:{number}", "a line that is damaged"))
            elif record.get("record") == "journal":
                archive_id = str(record.get("archive_id"))
            else:
                _keep_last(found.records.setdefault(archive_id, {}), record)
    return found


def _keep_last(records: dict[int, Record], record: Record) -> None:
    known = records.get(record["inode"])
    if known is None or record["seq"] >= known["seq"]:
        records[record["inode"]] = record


def _record_of(line: str) -> Record | None:
    """Return a line's record if the line is as it was written."""
    found = _CRC.search(line.rstrip("\n"))
    if found is None:
        return None
    text = line[: found.start()] + "}"
    if f"{zlib.crc32(text.encode()):08x}" != found[1]:
        return None
    record: Record = json.loads(text)
    with contextlib.suppress(DataError):
        if record.get("record") != "journal":
            check_record(record)
        return record
    return None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
