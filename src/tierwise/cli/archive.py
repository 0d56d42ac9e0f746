"""`tierwise archive`: parse, call one function of `tierwise.archive`, print its records."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierwise.cli.options import debug_option, json_option, print_result
from tierwise.core.progress import Progress, choose_progress

if TYPE_CHECKING:
    from tierwise.archive.vault import Archive

_ROOT = click.argument("root", type=click.Path(path_type=Path))
_PATHS = click.argument("paths", nargs=-1, required=True)


@click.group()
def group() -> None:
    """Which medium: a file system over a disc library."""


@contextmanager
def _opened(root: Path, *, write: bool = False) -> Iterator[Archive]:
    from tierwise.core.extras import require_extra

    require_extra("archive")
    from tierwise.archive.vault import Archive

    with Archive.open(root, write=write) as archive:
        yield archive


def _progress(as_json: bool) -> Progress:
    return choose_progress(as_json=as_json)


def _row(value: Any) -> dict[str, Any]:
    """Return a report as a JSON object."""
    return dataclasses.asdict(value)


def _report(record: Any, wrong: Sequence[object], *, as_json: bool) -> None:
    """Print what a verb found, each wrong thing on a line, and end with 9 if there is any."""
    row = record if isinstance(record, dict) else _row(record)
    if not as_json:
        for thing in wrong:
            click.echo(thing if isinstance(thing, str) else "  ".join(map(str, _parts(thing))))
        row = {key: len(value) if isinstance(value, tuple) else value for key, value in row.items()}
    print_result(row, as_json=as_json)
    if wrong:
        click.get_current_context().exit(9)


def _parts(thing: object) -> tuple[object, ...]:
    return thing if isinstance(thing, tuple) else (thing,)


@group.command()
@_ROOT
@click.option("--disc", "--disc-size", "disc", default="bd-100", show_default=True,
              help="bd-25 ... bd-128, or a size.")  # fmt: skip
@click.option("--array", default="10+2", show_default=True, help="Data + parity discs.")
@click.option("--slots", default=6120, show_default=True, help="Discs the library holds.")
@click.option("--library", type=click.Path(path_type=Path),
              help="Folder of the simulated discs; default: in ROOT.")  # fmt: skip
@click.option("--forepart", default="256KiB", show_default=True, help="Head of files kept on disk.")
@click.option("--buffer", default=None, help="Size of the disk buffer; default: the disk.")
@click.option("--changer", help="A real library's robot, like /dev/sg3; default: a simulated one.")
@click.option("--drive", "drives", multiple=True, help="Its drives in its order, like /dev/sr0.")
@click.option("--burner", type=click.Choice(["growisofs", "xorriso"]), default="growisofs",
              show_default=True, help="What writes real discs.")  # fmt: skip
@json_option
@debug_option
def init(  # noqa: PLR0917 - click gives them by name
    root: Path,
    disc: str,
    array: str,
    slots: int,
    library: Path | None,
    forepart: str,
    buffer: str | None,
    changer: str | None,
    drives: tuple[str, ...],
    burner: str,
    as_json: bool,
) -> None:
    """Make an archive in ROOT, with a simulated library of blank discs or a real one."""
    from tierwise.core.extras import require_extra
    from tierwise.core.units import parse_size

    require_extra("archive")
    from tierwise.archive.config import parse_array, parse_disc
    from tierwise.archive.drive import Burner, Devices
    from tierwise.archive.vault import Archive

    devices = None
    if changer is not None or drives:
        devices = Devices(changer=changer or "", drives=drives, burner=Burner(burner))
    media, disc_size_bytes = parse_disc(disc)
    data_discs, parity_discs = parse_array(array)
    with Archive.init(
        root,
        archive_id=secrets.token_hex(16),
        disc_size_bytes=disc_size_bytes,
        media=media,
        data_discs=data_discs,
        parity_discs=parity_discs,
        forepart_bytes=parse_size(forepart),
        buffer_size_bytes=None if buffer is None else parse_size(buffer),
        library=library,
        library_slots=slots,
        devices=devices,
    ) as archive:
        print_result(
            {"root": str(root), "archive_id": archive.config.archive_id, "array": array,
             "disc_size_bytes": disc_size_bytes},
            as_json=as_json,
        )  # fmt: skip


@group.command()
@_ROOT
@click.argument("mountpoint", type=click.Path(path_type=Path))
@click.option(
    "--recall",
    type=click.Choice(["wait", "forepart", "refuse"]),
    default="wait",
    show_default=True,
    help="What becomes of files whose bytes are only on disc: wait; their head; no opening.",
)
@click.option("--refuse-uid", type=int, multiple=True, help="Users whose reads wait for no disc.")
@click.option("--refuse-program", multiple=True, help="Programs whose reads wait for no disc.")
@json_option
@debug_option
def mount(  # noqa: PLR0917 - click gives them by name
    root: Path,
    mountpoint: Path,
    recall: str,
    refuse_uid: tuple[int, ...],
    refuse_program: tuple[str, ...],
    as_json: bool,
) -> None:
    """Mount the archive on MOUNTPOINT until it is unmounted or interrupted."""
    from tierwise.core.extras import require_extra

    require_extra("archive")
    from tierwise.archive.fuse import serve
    from tierwise.archive.vault import mountable

    fs = mountable(
        root,
        wait_for_discs=recall == "wait",
        refuse_offline=recall == "refuse",
        refuse_uids=refuse_uid,
        refuse_programs=refuse_program,
    )

    def say() -> None:
        print_result(
            {"root": str(root), "mountpoint": str(mountpoint)},
            as_json=as_json,
            text=f"{root} is mounted on {mountpoint}",
        )

    serve(fs, mountpoint, on_ready=say)


@group.command()
@_ROOT
@json_option
@debug_option
def status(root: Path, as_json: bool) -> None:
    """Say where the bytes are, and what waits for the next step."""
    with _opened(root) as archive:
        found = archive.status()
    print_result(found, as_json=as_json, text=_status_text(found))


def _status_text(found: dict[str, Any]) -> str:
    """Return a status as lines for people."""
    from tierwise.core.units import format_size

    disc = format_size(found["disc_size_bytes"])
    lines = [
        f"archive   {found['archive_id']}, arrays of {found['array']} discs of {disc}",
        f"names     {found['files']} files, {found['folders']} folders",
    ]
    lines += [
        f"{state:<9} {row['versions']} contents, {format_size(row['bytes'])}"
        for state, row in found["content"].items()
    ]
    lines.append(f"buffer    {format_size(found['buffer_bytes'])}")
    for what in ("images", "arrays", "discs", "recalls"):
        counts = ", ".join(f"{count} {state}" for state, count in found[what].items())
        lines.append(f"{what:<9} {counts or 'none'}")
    if found["unrecorded_changes"]:
        lines.append(f"{found['unrecorded_changes']} changes of names are on no image yet")
    return "\n".join(lines)


@group.command()
@_ROOT
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it to a file.")
@json_option
@debug_option
def inventory(root: Path, output: Path | None, as_json: bool) -> None:
    """Print the inventory for the cost model, as JSON either way."""
    import json

    from tierwise.core.records import write_whole

    with _opened(root) as archive:
        text = json.dumps(archive.inventory(), indent=2) + "\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(output, text)


@group.command("ls")
@_ROOT
@click.argument("path", default="")
@click.option("-D", "discs", is_flag=True, help="Also the discs each file is on.")
@json_option
@debug_option
def list_files(root: Path, path: str, discs: bool, as_json: bool) -> None:
    """List a folder: state, size, name."""
    with _opened(root) as archive:
        rows = archive.listing(path)
    if as_json:
        print_result({"entries": rows}, as_json=True)
        return
    for row in rows:
        labels = "  " + " ".join(row["discs"]) if discs else ""
        click.echo(f"{row['state']:<9}{row['size']:>14}  {row['name']}{labels}")


@group.command()
@_ROOT
@_PATHS
@json_option
@debug_option
def which(root: Path, paths: tuple[str, ...], as_json: bool) -> None:
    """List the discs that reading PATHS would need."""
    with _opened(root) as archive:
        rows = archive.which(paths)
    if as_json:
        print_result({"discs": rows}, as_json=True)
        return
    for row in rows:
        health = "" if row["good"] else "  (lost or damaged: its array stands in)"
        size = f"{row['num_files']} files  {row['bytes']} bytes"
        click.echo(f"{row['label']}  slot {row['slot']}  {size}{health}")
    if not rows:
        click.echo("none: everything is in the buffer")


@group.command()
@_ROOT
@click.argument("path")
@json_option
@debug_option
def versions(root: Path, path: str, as_json: bool) -> None:
    """List the contents a file has had."""
    with _opened(root) as archive:
        rows = archive.versions(path)
    if as_json:
        print_result({"versions": rows}, as_json=True)
        return
    for row in rows:
        click.echo(
            f"{row['number']:>4}  {row['size']:>14}  {row['state']:<9}  {row['sha256'] or ''}"
        )


@group.command("import")
@_ROOT
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", default="")
@json_option
@debug_option
def import_tree(root: Path, source: Path, destination: str, as_json: bool) -> None:
    """Copy a folder into the archive without a mount."""
    with _opened(root, write=True) as archive:
        report = archive.files.import_tree(source, destination, progress=_progress(as_json))
    print_result(_row(report), as_json=as_json)


@group.command()
@_ROOT
@_PATHS
@click.option("--to", "target", type=click.Path(path_type=Path), required=True)
@click.option("--version", "number", type=int, help="An older content of one file.")
@click.option("--bagit", is_flag=True, help="Write a bag (RFC 8493) that any validator checks.")
@json_option
@debug_option
def export(  # noqa: PLR0917 - click gives them by name
    root: Path, paths: tuple[str, ...], target: Path, number: int | None, bagit: bool, as_json: bool
) -> None:
    """Copy files out of the archive, with their hashes checked."""
    with _opened(root) as archive:
        report = archive.export(
            paths, target, bagit=bagit, number=number, progress=_progress(as_json)
        )
    print_result(_row(report), as_json=as_json)


@group.command()
@_ROOT
@click.option("--partial", is_flag=True, help="Also the last image, which has room left.")
@json_option
@debug_option
def seal(root: Path, partial: bool, as_json: bool) -> None:
    """Make disc images of full buckets."""
    with _opened(root) as archive:
        reports = archive.seal(partial=partial, progress=_progress(as_json))
    result = {
        "images": [_row(report) for report in reports] if as_json else len(reports),
        "bytes": sum(report.bytes for report in reports),
    }
    print_result(result, as_json=as_json)


@group.command()
@_ROOT
@click.option("--partial", is_flag=True, help="Also the last array, which has room left.")
@json_option
@debug_option
def burn(root: Path, partial: bool, as_json: bool) -> None:
    """Give full arrays their parity, burn them, and read every disc back."""
    with _opened(root) as archive:
        report = archive.burn(partial=partial, progress=_progress(as_json))
    print_result(_row(report), as_json=as_json)


@group.command()
@_ROOT
@click.argument("paths", nargs=-1)
@click.option("--bytes", "target", help="Stop when so much is free.")
@json_option
@debug_option
def evict(root: Path, paths: tuple[str, ...], target: str | None, as_json: bool) -> None:
    """Remove buffer copies that verified discs make unnecessary."""
    from tierwise.core.units import parse_size

    with _opened(root) as archive:
        report = archive.evict(
            paths or None,
            target_bytes=None if target is None else parse_size(target),
            progress=_progress(as_json),
        )
    print_result(_row(report), as_json=as_json)


@group.command()
@_ROOT
@_PATHS
@click.option("--prepare", is_flag=True, help="Only queue it, and print the request's number.")
@click.option("--dry-run", is_flag=True, help="Only list the discs it needs.")
@json_option
@debug_option
@click.pass_context
def recall(  # noqa: PLR0917 - click gives them by name
    ctx: click.Context,
    root: Path,
    paths: tuple[str, ...],
    prepare: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Bring PATHS back from disc to the buffer."""
    if dry_run:
        ctx.invoke(which, root=root, paths=paths, as_json=as_json)
        return
    with _opened(root) as archive:
        if prepare:
            print_result({"request": archive.prepare(paths)}, as_json=as_json)
            return
        report = archive.recall(paths, progress=_progress(as_json))
    _report(report, report.failed, as_json=as_json)


@group.command()
@_ROOT
@click.option("--serve", is_flag=True, help="Bring back everything that is queued.")
@click.option("--cancel", type=int, help="Drop what a request has not got yet.")
@click.option("--release", type=int, help="Let the buffer have a request's files back.")
@json_option
@debug_option
def requests(
    root: Path, serve: bool, cancel: int | None, release: int | None, as_json: bool
) -> None:
    """List recall requests; serve, cancel or release them."""
    with _opened(root) as archive:
        result: dict[str, Any] = {}
        if cancel is not None:
            result["cancelled"] = archive.queue.cancel(cancel)
        if release is not None:
            result["released"] = archive.queue.release(release)
        if serve:
            result |= _row(archive.serve_recalls(progress=_progress(as_json)))
        result["requests"] = [_row(state) for state in archive.queue.requests()]
    print_result(result, as_json=as_json)


@group.command()
@_ROOT
@click.option("--max-discs", type=int, help="Stop after so many; the next run goes on.")
@click.option("--older-than", help="Only discs not verified for so long, like 180d.")
@json_option
@debug_option
def scrub(root: Path, max_discs: int | None, older_than: str | None, as_json: bool) -> None:
    """Read discs whole and compare their hashes, the longest unread first."""
    from tierwise.core.units import parse_duration

    with _opened(root) as archive:
        limit = None
        if older_than is not None:
            limit = archive.clock() - int(parse_duration(older_than) * 1e9)
        report = archive.scrub(
            older_than_ns=limit, max_discs=max_discs, progress=_progress(as_json)
        )
    _report(report, report.failed, as_json=as_json)


@group.command()
@_ROOT
@json_option
@debug_option
def repair(root: Path, as_json: bool) -> None:
    """Make lost and damaged discs anew from their arrays."""
    with _opened(root) as archive:
        report = archive.repair(progress=_progress(as_json))
    _report(report, report.beyond, as_json=as_json)


@group.command()
@_ROOT
@json_option
@debug_option
def verify(root: Path, as_json: bool) -> None:
    """Check every buffered file and image, and every disc, against its hash."""
    with _opened(root) as archive:
        report = archive.verify(progress=_progress(as_json))
    _report(report, report.problems, as_json=as_json)


@group.command()
@_ROOT
@json_option
@debug_option
def fsck(root: Path, as_json: bool) -> None:
    """Check that catalogue and buffer agree, without reading bytes."""
    with _opened(root) as archive:
        problems = archive.fsck(progress=_progress(as_json))
    _report({"problems": problems if as_json else len(problems)}, problems, as_json=as_json)


@group.command()
@_ROOT
@click.option(
    "--from",
    "sources",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Disc images, or folders of them; default: the archive's own library.",
)
@json_option
@debug_option
def rebuild(root: Path, sources: tuple[Path, ...], as_json: bool) -> None:
    """Make the catalogue anew from discs alone."""
    from tierwise.core.extras import require_extra

    require_extra("archive")
    from tierwise.archive.vault import Archive

    report = Archive.rebuild(root, sources, progress=_progress(as_json))
    row = _row(report)
    if not as_json:
        for path in report.files_missing:
            click.echo(f"missing: {path}")
        for path, fault in report.faults:
            click.echo(f"fault: {path}: {fault}")
        row = {key: len(value) if isinstance(value, tuple) else value for key, value in row.items()}
    print_result(row, as_json=as_json)


@group.command()
@_ROOT
@click.option("--last", default=50, show_default=True, help="How many.")
@json_option
@debug_option
def events(root: Path, last: int, as_json: bool) -> None:
    """Show the log of what happened, in PREMIS terms."""
    with _opened(root) as archive:
        rows = archive.events(last)
    if as_json:
        print_result({"events": rows}, as_json=True)
        return
    for row in rows:
        click.echo(
            f"{row['time']}  {row['outcome']:<8}{row['type']:<14}{row['object']}  {row['detail']}"
        )
