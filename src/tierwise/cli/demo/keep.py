"""Step 3, which medium: write everything through the file system, burn it, lose a disc, read back.

The archive is mounted (FUSE) where the system allows it; otherwise the same file system is called
as a library. Both ways the discs hold the same files. Every file is read back after its copy on
disk is gone and a disc is destroyed, and compared by SHA-256 with what was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tierwise.archive.figures import disc_map
from tierwise.archive.fuse import can_mount, clear_stale_mount, mounted_process
from tierwise.archive.vault import Archive, mountable
from tierwise.cli.demo.settings import ArchiveSettings, DemoSettings
from tierwise.cli.steps import StepContext
from tierwise.core.errors import AccessError, IntegrityError
from tierwise.core.records import hash_file, write_whole
from tierwise.core.report import Figure, Section, Table, Text
from tierwise.core.units import format_size, parse_size

MOUNTPOINT = "mount"


def run_keep(context: StepContext, settings: DemoSettings) -> None:
    """Fill an archive, burn it, destroy a disc, read everything back, leave the inventory."""
    started = time.monotonic()
    sources = _sources(context.run_folder)
    hashes = {name: hash_file(path) for name, path in sources.items()}
    write_whole(context.folder / "hashes.json", json.dumps(hashes, indent=1) + "\n")
    root = _new_archive(context.folder, settings)
    reason = _fill(context, root, sources, settings.archive)
    with Archive.open(root, write=False) as archive:
        archive.seal(partial=True, progress=context.progress)
        archive.burn(partial=True, progress=context.progress)
        evicted = archive.evict()
        slot, label = archive.catalogue.all(
            "SELECT slot, label FROM discs JOIN images USING (image)"
            " WHERE kind = 'data' ORDER BY image LIMIT 1"
        )[0]
        archive.shelf.destroy(slot)
        inventory = archive.inventory()
    read = _read_all(context, root, sources, mounted=reason is None)
    wrong = sorted(name for name, digest in hashes.items() if read.get(name) != digest)
    if wrong:
        raise IntegrityError(f"{len(wrong)} files came back wrong, such as {wrong[0]}")
    _leave(context, root, inventory, lost=label)
    context.record.event(
        "archive.read_back",
        num_files=len(hashes),
        num_intact=len(hashes) - len(wrong),
        num_discs=inventory["num_discs"],
        num_parity_discs=inventory["num_parity_images"],
        num_discs_destroyed=1,
        logical_bytes=inventory["logical_bytes"],
        written_through="the file system called as a library" if reason else "a FUSE mount",
        timing={
            "seconds": round(time.monotonic() - started, 3),
            "evicted_bytes": evicted.bytes,
            "why_no_mount": reason or "",
        },
    )


def let_go(folder: Path) -> None:
    """Unmount what a killed demo left mounted, before its folder is emptied."""
    mountpoint = folder / MOUNTPOINT
    with contextlib.suppress(FileNotFoundError):
        clear_stale_mount(mountpoint)


def _sources(run: Path) -> dict[str, Path]:
    """Return path in the archive -> file: the data set, the scores, the last checkpoint."""
    checkpoint = sorted((run / "2-offload" / "overlapped" / "checkpoints").iterdir())[-1]
    folders = {"data": run / "0-data", "scores": run / "1-curriculum", "checkpoint": checkpoint}
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path
        for name, folder in folders.items()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def _new_archive(folder: Path, settings: DemoSettings) -> Path:
    archive: ArchiveSettings = settings.archive
    root = folder / "vault"
    Archive.init(
        root,
        archive_id=hashlib.sha256(f"tierwise demo {settings.seed}".encode()).hexdigest()[:32],
        disc_size_bytes=parse_size(archive.disc_size),
        data_discs=archive.data_discs,
        parity_discs=archive.parity_discs,
        forepart_bytes=0,  # so that every byte read back comes from a disc
        library_slots=120,
    ).close()
    return root


@contextlib.contextmanager
def _mount(folder: Path, root: Path) -> Iterator[Path]:
    mountpoint = folder / MOUNTPOINT
    mountpoint.mkdir(exist_ok=True)
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        yield mount.path


def _fill(
    context: StepContext, root: Path, sources: dict[str, Path], settings: ArchiveSettings
) -> str | None:
    """Write every file through a mount, or say why not and write it through the library."""
    reason = can_mount() if settings.use_mount else "the settings say so"
    if reason is None:
        try:
            _write_all(context, root, sources, mounted=True)
        except AccessError as error:  # a container may refuse only when it is tried
            reason = error.message
        else:
            return None
    context.progress.note(f"      not mounted, called as a library: {reason}")
    _write_all(context, root, sources, mounted=False)
    return reason


def _write_all(
    context: StepContext, root: Path, sources: dict[str, Path], *, mounted: bool
) -> None:
    with context.progress.task("writing", len(sources)) as task:
        if mounted:
            with _mount(context.folder, root) as top:
                for name, path in sources.items():
                    (top / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, top / name)
                    task.advance()
        else:
            with Archive.open(root) as archive:
                for name, path in sources.items():
                    archive.files.make_folders(str(Path(name).parent))
                    archive.files.write_file(name, path.read_bytes())
                    task.advance()


def _read_all(
    context: StepContext, root: Path, sources: dict[str, Path], *, mounted: bool
) -> dict[str, str]:
    """Return path -> SHA-256 of what the archive gives back, from the discs that are left."""
    with context.progress.task("reading back", len(sources)) as task:
        found: dict[str, str] = {}
        if mounted:
            with _mount(context.folder, root) as top:
                for name in sources:
                    found[name] = hash_file(top / name)
                    task.advance()
        else:
            with Archive.open(root) as archive:
                for name in sources:
                    digest = hashlib.sha256()
                    for chunk in archive.files.read_chunks(name):
                        digest.update(chunk)
                    found[name] = digest.hexdigest()
                    task.advance()
        return found


def _leave(context: StepContext, root: Path, inventory: dict[str, object], *, lost: str) -> None:
    write_whole(context.folder / "inventory.json", json.dumps(inventory, indent=2) + "\n")
    with Archive.open(root, write=False) as archive:
        figure = disc_map(archive.catalogue, lost=[lost])
    for kind, text in (("svg", figure.svg), ("csv", figure.csv), ("txt", figure.caption)):
        write_whole(context.folder / f"{figure.name}.{kind}", text)


def keep_section(context: StepContext) -> Section:
    """Return the report's section about the archive."""
    folder = context.run_folder / "3-archive"
    inventory = json.loads((folder / "inventory.json").read_text())
    svg, csv, caption = (
        (folder / f"archive-map.{kind}").read_text(encoding="utf-8")
        for kind in ("svg", "csv", "txt")
    )
    done = [event for event in context.record.events() if event["event"] == "archive.read_back"][-1]
    why_not = done["timing"]["why_no_mount"]
    rows = (
        ("written through", " - ".join(filter(None, (done["written_through"], why_not)))),
        ("files", f"{done['num_files']} of {format_size(done['logical_bytes'])} in all"),
        (
            "discs",
            f"{inventory['num_images']} with files, {inventory['num_parity_images']} with parity, "
            f"{format_size(inventory['disc_size_bytes'], binary=True)} each",
        ),
        ("destroyed", "1 disc with files, after the copies on disk were evicted"),
        ("read back and equal by SHA-256", f"{done['num_intact']} of {done['num_files']}"),
    )
    return Section(
        title="Which medium",
        blocks=(
            Text(
                text="The data set, the scores and the checkpoint were written as ordinary files, "
                "packed into disc images that any system can read, given parity across discs and "
                "burned to a simulated library. Then one disc was destroyed and every file was "
                "read back, what it had held rebuilt from the others."
            ),
            Figure(name="archive-map", caption=caption, svg=svg, csv=csv),
            Table(caption="The archive", header=("what", "measured"), rows=rows),
        ),
    )
