"""The archive as one object: opened, filled, sealed, burned, evicted, recalled, checked.

```
write -> bucket -> seal -> image -> burn (parity, discs, verified) -> evict
                                                                       |
read <- buffer file <- recall <- disc, or rebuilt from its array <-----'
```

Two locks: `namespace.lock` belongs to the one mount (or library session) that may write files,
`maintenance.lock` to the one verb that seals, burns, evicts or mends. So every verb runs on a
mounted archive as well. All of them can be cut off anywhere and run again.

Left out: what each step does; those are the modules `bucket`, `seal`, `burn`, `evict`, `recall`,
`scrub` and `rebuild`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tierwise.archive import inventory as counts
from tierwise.archive import questions, recovery
from tierwise.archive.bucket import BucketPlanner
from tierwise.archive.burn import Burner, BurnReport
from tierwise.archive.catalogue import Catalogue, Clock, FileLock
from tierwise.archive.changer import count_slots
from tierwise.archive.checks import VerifyReport, fsck, verify
from tierwise.archive.config import (
    CONFIG_NAME,
    ArchiveConfig,
    config_from_record,
    read_archive_config,
    write_archive_config,
)
from tierwise.archive.drive import Devices
from tierwise.archive.evict import EvictReport, evict
from tierwise.archive.export import ExportReport, export_files
from tierwise.archive.files import Files
from tierwise.archive.founding import claim, declare_finished
from tierwise.archive.fs import ArchiveFileSystem, Pause, wait_for_room
from tierwise.archive.gather import Computed, DiscReader
from tierwise.archive.journal import Journal, journal_path, read_journal, sign_buffer
from tierwise.archive.mend import Mender
from tierwise.archive.namespace import Namespace
from tierwise.archive.operations import Caller
from tierwise.archive.questions import AnyPath
from tierwise.archive.rebuild import RebuildReport, Refill
from tierwise.archive.recall import Recaller
from tierwise.archive.requests import RecallQueue, RecallReport, which_discs
from tierwise.archive.room import Room
from tierwise.archive.scrub import RepairReport, ScrubReport, repair, scrub
from tierwise.archive.seal import ImageReport, Sealer
from tierwise.archive.shelf import Shelf
from tierwise.archive.store import Store
from tierwise.core.errors import MissingFileError, StateError, UsageError
from tierwise.core.progress import SILENT, Progress

CATALOGUE = "metadata/catalogue.db"
FOREPARTS = "metadata/foreparts.db"
COMPUTED = "metadata/rebuild.unfinished"


class Archive:
    """An open archive; use `Archive.init` and `Archive.open`, and close it (or use `with`).

    Attributes:
        root: Its folder.
        config: What it was made with.
        catalogue: Everything known without touching discs.
        fs: The file system, to mount; `StateError` unless opened for writing.
        files: Paths for library callers, on the same file system.
        library: Where the discs are.
    """

    def __init__(
        self, root: Path, config: ArchiveConfig, catalogue: Catalogue, *, clock: Clock,
        crash_point: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.root, self.config, self.catalogue = root, config, catalogue
        self.clock, self.crash_point = clock, crash_point
        self.store = Store(root, catalogue)
        self.shelf = Shelf(root, config)
        self.mender = Mender(catalogue, self.store, self.shelf)
        self.recaller = Recaller(catalogue, self.store, self.shelf, self.mender)
        self.queue = RecallQueue(catalogue, self.store, self.recaller)
        self.may_recall: Callable[[Caller], bool] = lambda caller: True
        self.pause: Pause = wait_for_room
        self._room = Room(
            catalogue, config.buffer_size_bytes, unsettled=self._unsettled_bytes, evict=self._free
        )
        self._namespace_lock: FileLock | None = None
        self._fs: ArchiveFileSystem | None = None

    @classmethod
    def init(
        cls,
        root: Path,
        *,
        archive_id: str,
        disc_size_bytes: int,
        media: str = "disc",
        data_discs: int = 10,
        parity_discs: int = 2,
        forepart_bytes: int = 256 * 1024,
        versions_kept: int = 15,
        buffer_size_bytes: int | None = None,
        library: Path | None = None,
        library_slots: int = 6120,
        devices: Devices | None = None,
        clock: Clock = time.time_ns,
        crash_point: Callable[[str], None] = lambda name: None,
    ) -> Archive:
        """Make a new archive, with a simulated library of blank discs or a real one, and open it.

        Args:
            root: A folder that does not exist, is empty, or holds an init that was cut off.
            archive_id: 32 hex digits, unlike any other archive's; parts of it label the discs.
            disc_size_bytes: What a disc holds.
            media: Disc type, for the inventory.
            data_discs: Data images per array.
            parity_discs: Parity images per array.
            forepart_bytes: Head of each file that stays in the metadata volume.
            versions_kept: Contents of a file that stay listed.
            buffer_size_bytes: What the disk buffer may hold; None: the disk.
            library: Folder of the library, new or empty; None: in the archive's.
            library_slots: Discs the library holds; a real one says so itself.
            devices: Changer and drives of a real library.
            clock: Nanoseconds since 1970: times of what is made here, and of events.
            crash_point: Called between steps with their names; tests die there.

        Raises:
            StateError: There is an archive, or something else, already; the changer refuses.
            ConfigError: Sizes that do not fit together.
            MissingFileError: A program that drives real devices is not installed.
        """
        if devices is not None:
            library_slots = count_slots(devices)
        config = ArchiveConfig(
            archive_id=archive_id,
            disc_size_bytes=disc_size_bytes,
            media=media,
            data_discs=data_discs,
            parity_discs=parity_discs,
            forepart_bytes=forepart_bytes,
            versions_kept=versions_kept,
            buffer_size_bytes=buffer_size_bytes,
            library="library" if library is None else str(library.absolute()),
            library_slots=library_slots,
            devices=devices,
        )
        claim(root, config.library)
        (root / "metadata").mkdir(parents=True, exist_ok=True)
        Store.make_folders(root)
        Shelf.create(root, config)
        Catalogue.create(root / CATALOGUE, archive_id)
        catalogue = Catalogue(root / CATALOGUE, root / FOREPARTS, clock)
        Namespace(catalogue).make_root(mode=0o755, uid=os.getuid(), gid=os.getgid())
        recovery.mark_clean(catalogue)
        catalogue.close()
        write_archive_config(root, config)  # from now on it is an archive
        declare_finished(root)
        return cls.open(root, clock=clock, crash_point=crash_point)

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        write: bool = True,
        clock: Clock = time.time_ns,
        crash_point: Callable[[str], None] = lambda name: None,
    ) -> Archive:
        """Open an archive.

        Args:
            root: Its folder.
            write: Take the namespace: files can be read and written here, and by nobody else.
                Without it every verb works, on a mounted archive too, but not `fs` and `files`.
            clock: Nanoseconds since 1970.
            crash_point: Called between steps with their names; tests die there.

        Raises:
            MissingFileError: No archive there, or it has lost its catalogue (see `rebuild`).
            StateError: Somebody else has the namespace.
            DataError: The archive is of a newer format, or its catalogue is damaged.
        """
        config = read_archive_config(root)
        lock = catalogue = None
        if write:
            lock = FileLock(root / "namespace.lock", f"{root} is locked by another mount")
            declare_finished(root)  # an init may have been cut off just before it did
        try:
            catalogue = Catalogue(root / CATALOGUE, root / FOREPARTS, clock)
            if write:
                sign_buffer(root, config.archive_id)
        except BaseException:
            if catalogue is not None:
                catalogue.close()
            if lock is not None:
                lock.release()
            raise
        archive = cls(root, config, catalogue, clock=clock, crash_point=crash_point)
        if lock is not None:
            archive._take_namespace(lock)
        return archive

    def _take_namespace(self, lock: FileLock) -> None:
        self._namespace_lock = lock
        journal = Journal(journal_path(self.root), self.catalogue)
        self._fs = ArchiveFileSystem(
            self.catalogue,
            self.store,
            recall=self.recaller.recall_version,
            may_recall=lambda caller: self.may_recall(caller),  # noqa: PLW0108 - may change
            room=self._room,
            pause=lambda event, seconds: self.pause(event, seconds),  # noqa: PLW0108 - may change
            usage=self._usage,
            journal=journal,
            crash_point=self.crash_point,
            passthrough=self.config.buffer_size_bytes is None,
        )
        self._fs.free_unnamed()
        self.store.drop_recalled()
        if not recovery.was_clean(self.catalogue):
            recovery.recover(self.catalogue, self.store)
            with contextlib.suppress(StateError), self._maintenance():
                recovery.remove_orphans(self.catalogue, self.store)
            journal.catch_up()
        recovery.mark_open(self.catalogue)

    def close(self) -> None:
        """Make everything durable and let go of the archive."""
        if self._fs is not None:
            self._fs.destroy()
        self.let_go()

    def let_go(self) -> None:
        """Close what is left when the file system is closed already, as after an unmount."""
        if self._fs is not None:
            recovery.mark_clean(self.catalogue)
            self._fs = None
        self.catalogue.close()
        if self._namespace_lock is not None:
            self._namespace_lock.release()

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    @property
    def fs(self) -> ArchiveFileSystem:
        """The file system, for a mount."""
        if self._fs is None:
            raise StateError("the archive was opened without its files", hint="open it to write")
        return self._fs

    @property
    def files(self) -> Files:
        """Paths for library callers."""
        return Files(self.fs, self.clock)

    @contextlib.contextmanager
    def _maintenance(self) -> Iterator[None]:
        busy = f"another verb is at work on {self.root}"
        with FileLock(self.root / "maintenance.lock", busy):
            yield

    # Room

    def _unsettled_bytes(self) -> int:
        return 0 if self._fs is None else self._fs.contents.unsettled_bytes()

    def _free(self, num_bytes: int) -> int:
        """Evict up to so many bytes for a writer; return how many went."""
        with contextlib.suppress(StateError), self._maintenance():
            return self._evict(None, num_bytes).bytes
        return 0

    def _usage(self) -> tuple[int, int]:
        """Return (bytes used, bytes free): what may be written now, without waiting for discs."""
        used = int(self.catalogue.value("SELECT COALESCE(SUM(size), 0) FROM inodes"))
        return used, self._room.free_bytes(self.store.free_bytes())

    # The path of a byte

    def seal(self, *, partial: bool = False, progress: Progress = SILENT) -> list[ImageReport]:
        """Make disc images of what has been closed; an image planned earlier is finished first.

        Args:
            partial: Also make the last image, which would have had room for more.
            progress: Counts images.
        """
        with self._maintenance():
            sealer = Sealer(self.catalogue, self.store, self.config)
            planner = BucketPlanner(self.catalogue, self.store, self.config)
            reports: list[ImageReport] = []
            with progress.task("seal", None) as task:
                while True:
                    waiting = sealer.planned()
                    image = waiting[0] if waiting else planner.plan_next(partial=partial)
                    if image is None:
                        sealer.forget_deleted()
                        return reports
                    self.crash_point("seal: image planned")
                    try:
                        reports.append(sealer.seal(image, crash_point=self.crash_point))
                    except UsageError:
                        planner.unplan(image)
                        continue
                    self.crash_point("seal: image entered")
                    task.advance()

    def burn(self, *, partial: bool = False, progress: Progress = SILENT) -> BurnReport:
        """Give finished arrays their parity and burn them; see `Burner.burn`."""
        with self._maintenance():
            report = self._burner().burn(partial=partial, progress=progress)
            self.store.prune_versions(self.config.versions_kept)
            return report

    def _burner(self) -> Burner:
        return Burner(self.catalogue, self.store, self.config, self.shelf, self.crash_point)

    def evict(
        self, paths: Iterable[AnyPath] | None = None, *, target_bytes: int | None = None,
        progress: Progress = SILENT,
    ) -> EvictReport:  # fmt: skip
        """Remove buffer copies that discs make unnecessary: of some files, or least used first."""
        versions = None if paths is None else self._versions_of(paths)
        with self._maintenance():
            return self._evict(versions, target_bytes, progress)

    def _evict(
        self, versions: Iterable[int] | None, target_bytes: int | None, progress: Progress = SILENT
    ) -> EvictReport:
        return evict(
            self.catalogue,
            self.store,
            forepart_bytes=self.config.forepart_bytes,
            versions=versions,
            target_bytes=target_bytes,
            progress=progress,
            crash_point=self.crash_point,
        )

    # Questions

    def _versions_of(self, paths: Iterable[AnyPath]) -> list[int]:
        return questions.versions_below(self.catalogue, paths)

    def status(self) -> dict[str, Any]:
        """Return where the bytes are and what waits for the next step."""
        return counts.status(self.catalogue, self.config)

    def inventory(self) -> dict[str, Any]:
        """Return the inventory for the cost model; docs/formats/inventory.md."""
        return counts.inventory(self.catalogue, self.config)

    def which(self, paths: Iterable[AnyPath]) -> list[dict[str, Any]]:
        """Return the discs that reading some files would need, without touching any."""
        return which_discs(self.catalogue, self._versions_of(paths))

    def listing(self, path: AnyPath = "") -> list[dict[str, Any]]:
        """Return a folder's entries, or the file itself: name, mode, size, times, state, discs."""
        return questions.list_folder(self.catalogue, path)

    def versions(self, path: AnyPath) -> list[dict[str, Any]]:
        """Return the contents a file has had, oldest first."""
        return questions.list_versions(self.catalogue, path)

    def events(self, last: int = 50) -> list[dict[str, Any]]:
        """Return the last events, oldest first."""
        return questions.list_events(self.catalogue, last)

    # The way back

    def prepare(self, paths: Iterable[AnyPath]) -> int:
        """Ask for files to be brought back; return the request's number."""
        return self.queue.prepare(self._versions_of(paths))

    def serve_recalls(self, *, progress: Progress = SILENT) -> RecallReport:
        """Bring back everything that is queued."""
        return self.queue.serve(progress=progress)

    def recall(self, paths: Iterable[AnyPath], *, progress: Progress = SILENT) -> RecallReport:
        """Bring files back to the buffer now, with whatever else is queued."""
        request = self.prepare(paths)
        try:
            return self.queue.serve(progress=progress)
        finally:
            self.queue.release(request)

    def export(
        self, paths: Iterable[AnyPath], target: Path, *, bagit: bool = False,
        number: int | None = None, progress: Progress = SILENT,
    ) -> ExportReport:  # fmt: skip
        """Copy files out, hashes checked; see `export.export_files`.

        Args:
            paths: Files, and folders with all below.
            target: A new folder.
            bagit: Write a BagIt bag.
            number: An older content, of a single file.
            progress: Counts files.
        """
        chosen = list(paths)
        files = questions.files_below(self.catalogue, chosen)
        if number is not None:
            files = [(path, self._older(version, number)) for path, version in files]
        others = [] if bagit else questions.others_below(self.catalogue, chosen)
        return export_files(
            files, target, catalogue=self.catalogue, store=self.store, recaller=self.recaller,
            bagit=bagit, others=others, progress=progress,
        )  # fmt: skip

    def _older(self, version: int, number: int) -> int:
        found = self.catalogue.value(
            "SELECT version FROM versions WHERE number = ? AND ino ="
            " (SELECT ino FROM versions WHERE version = ?)", number, version,
        )  # fmt: skip
        if found is None:
            raise MissingFileError(f"there is no version {number}")
        return int(found)

    # Health

    def scrub(
        self, *, older_than_ns: int | None = None, max_discs: int | None = None,
        progress: Progress = SILENT,
    ) -> ScrubReport:  # fmt: skip
        """Read discs whole and compare hashes; see `scrub.scrub`."""
        with self._maintenance():
            return scrub(
                self.catalogue, self.shelf, older_than_ns=older_than_ns, max_discs=max_discs,
                progress=progress, crash_point=self.crash_point,
            )  # fmt: skip

    def repair(self, *, progress: Progress = SILENT) -> RepairReport:
        """Make lost and suspect discs anew; see `scrub.repair`."""
        with self._maintenance():
            return repair(
                self.catalogue, self.mender, self._burner(), progress=progress,
                crash_point=self.crash_point,
            )  # fmt: skip

    def verify(self, *, progress: Progress = SILENT) -> VerifyReport:
        """Read everything that has a hash, and compare; changes nothing."""
        return verify(self.catalogue, self.store, self.shelf, progress=progress)

    def fsck(self, *, progress: Progress = SILENT) -> list[str]:
        """Return what does not fit between catalogue and buffer; reads no bytes."""
        return fsck(self.catalogue, self.store, progress=progress)

    @classmethod
    def rebuild(
        cls,
        root: Path,
        sources: Iterable[Path] = (),
        *,
        clock: Clock = time.time_ns,
        progress: Progress = SILENT,
        crash_point: Callable[[str], None] = lambda name: None,
    ) -> RebuildReport:
        """Make the catalogue anew from discs, and the archive around it if need be.

        Cut off, it starts again and comes to the same; images it computed already are kept.

        Args:
            root: The archive that lost its catalogue, or a new folder.
            sources: Disc images, or folders of them; none: the archive's own library and buffer.
            clock: Nanoseconds since 1970.
            progress: Counts discs.
            crash_point: Called between steps with their names; tests die there.

        Raises:
            StateError: There is a catalogue; move it away first.
            DataError: No disc of an archive among the sources.
        """
        if (root / CATALOGUE).exists():
            raise StateError(
                f"{root} has a catalogue", hint="move metadata/ away to have it made anew"
            )
        discs = _named_discs(sources)
        config = read_archive_config(root) if (root / CONFIG_NAME).exists() else None
        shelf = None if config is None else Shelf(root, config)
        if shelf is not None:
            discs |= {shelf.path_of(slot): slot for slot in shelf.written(look=True)}
        Store.make_folders(root)
        (root / "metadata").mkdir(parents=True, exist_ok=True)
        buffered = sorted((root / "buffer" / "images").glob("*.iso"))
        discs |= dict.fromkeys(buffered)
        with FileLock(root / "namespace.lock", f"{root} is locked by another mount"):
            return _rebuild(
                root, config, shelf, discs, clock=clock, progress=progress, crash_point=crash_point
            )


def _named_discs(sources: Iterable[Path]) -> dict[Path, int | None]:
    """Return the disc images that paths name: files, and the files in folders."""
    found: dict[Path, int | None] = {}
    for source in sources:
        if not source.exists():
            raise MissingFileError(f"no disc or folder {source}")
        paths = sorted(source.iterdir()) if source.is_dir() else [source]
        found |= {path: None for path in paths if path.is_file()}
    return found


def _rebuild(
    root: Path, config: ArchiveConfig | None, shelf: Shelf | None,
    discs: dict[Path, int | None], *, clock: Clock, progress: Progress,
    crash_point: Callable[[str], None],
) -> RebuildReport:  # fmt: skip
    """Make a catalogue beside its final place, fill it, and put it there when it is whole."""
    part, heads = root / (CATALOGUE + ".new"), root / FOREPARTS
    cut_off = [part.with_name(part.name + end) for end in ("", "-wal", "-shm")]
    for path in (*cut_off, *(root / "buffer" / "images").glob(".*.part")):
        path.unlink(missing_ok=True)
    Catalogue.create(part, "")
    catalogue = Catalogue(part, heads, clock)
    try:
        store = Store(root, catalogue)
        computed = Computed(root / COMPUTED)
        reader = DiscReader(store, shelf, computed=computed, crash_point=crash_point)
        found = reader.read(
            discs, progress, read_journal(root),
            archive_id=None if config is None else config.archive_id,
        )  # fmt: skip
        if config is None:
            config = config_from_record(found.archive_id, found.archive)
            write_archive_config(root, config)
            Shelf.create(root, config)
        catalogue.run("UPDATE meta SET value = ? WHERE key = 'archive_id'", found.archive_id)
        Namespace(catalogue).make_root(mode=0o755, uid=os.getuid(), gid=os.getgid())
        report = Refill(catalogue, store, found).run()
        crash_point("rebuild: catalogue filled")
        store.prune_versions(config.versions_kept)
        recovery.mark_clean(catalogue)
        catalogue.run("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        catalogue.close()
    part.replace(root / CATALOGUE)
    crash_point("rebuild: catalogue in place")
    computed.forget()
    return report


def mountable(
    root: Path,
    *,
    wait_for_discs: bool = True,
    refuse_offline: bool = False,
    refuse_uids: Collection[int] = (),
    refuse_programs: Collection[str] = (),
) -> ArchiveFileSystem:
    """Return an archive's file system for a mount; the archive closes when it is unmounted.

    Args:
        root: The archive's folder.
        wait_for_discs: Whether a read may wait for a disc; otherwise it gets EACCES beyond the
            forepart.
        refuse_offline: Whether those who may not wait are refused the opening itself, also of the
            forepart.
        refuse_uids: Users whose reads may not.
        refuse_programs: Names of programs (as in /proc/PID/comm) whose reads may not: indexers,
            thumbnailers.
    """

    def may_recall(caller: Caller) -> bool:
        if not wait_for_discs or caller.uid in refuse_uids:
            return False
        return not refuse_programs or _program(caller.pid) not in refuse_programs

    archive = Archive.open(root)
    archive.may_recall = may_recall
    fs = archive.fs
    fs.on_destroy = archive.let_go
    fs.refuse_offline = refuse_offline
    return fs


def _program(pid: int) -> str:
    """Return the name of a running program, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
