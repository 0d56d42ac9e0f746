"""Mounting, unmounting, and what is left when either goes wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tierwise.archive.fuse import (
    MountOptions,
    can_mount,
    clear_stale_mount,
    device,
    mounted,
    mounted_process,
    unmount,
)
from tierwise.archive.fuse.mirror import Mirror
from tierwise.core.errors import AccessError, MissingFileError, StateError, UsageError

SERVE = """
import sys
from pathlib import Path
from tierwise.archive.fuse import serve
from tierwise.archive.fuse.mirror import Mirror

class Loud(Mirror):
    def destroy(self):
        super().destroy()
        print("destroyed", flush=True)

serve(Loud(Path(sys.argv[1])), sys.argv[2], on_ready=lambda: print("ready", flush=True))
print("ended", flush=True)
"""

TRY = """
import sys
from functools import partial
from tierwise.archive.fuse import mounted_process
from tierwise.archive.fuse.mirror import Mirror
from tierwise.core.errors import AccessError

if __name__ == "__main__":
    try:
        with mounted_process(partial(Mirror, sys.argv[1]), sys.argv[2]):
            pass
    except AccessError as error:
        print(error.message)
"""


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    source, path = tmp_path / "source", tmp_path / "mount point"
    source.mkdir()
    path.mkdir()
    yield source, path
    with contextlib.suppress(StateError):
        unmount(path, lazy=True)


@contextlib.contextmanager
def served(source: Path, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Serve in the foreground of another interpreter, as the command line does."""
    command = [sys.executable, "-c", SERVE, str(source), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def rest_of(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.read().split()


def is_mounted(path: Path) -> bool:
    escaped = str(path).replace(" ", "\\040")
    return f" {escaped} fuse." in Path("/proc/mounts").read_text()


def test_a_mount_point_must_be_a_directory(places: tuple[Path, Path]) -> None:
    source, path = places
    (source / "file").write_text("")
    with (
        pytest.raises(MissingFileError, match="does not exist"),
        mounted(Mirror(source), path / "none"),
    ):
        pass
    with (
        pytest.raises(UsageError, match="not a directory"),
        mounted(Mirror(source), source / "file"),
    ):
        pass


def test_a_mount_shows_its_name_and_source(places: tuple[Path, Path]) -> None:
    source, path = places
    with mounted(Mirror(source), path, options=MountOptions(name="vault", source="/srv/v")):
        line = next(
            line for line in Path("/proc/mounts").read_text().splitlines() if "/srv/v" in line
        )
        assert line.split()[2] == "fuse.vault"
        assert {"nosuid", "nodev", "default_permissions"} <= set(line.split()[3].split(","))
    assert not is_mounted(path)


def test_a_mount_may_be_taken_away_and_put_back(places: tuple[Path, Path]) -> None:
    source, path = places
    for number in range(3):
        with mounted(Mirror(source), path):
            (path / f"{number}").write_text("x")
        assert list(path.iterdir()) == []
    assert len(list(source.iterdir())) == 3


def test_inode_numbers_are_the_same_after_a_remount(places: tuple[Path, Path]) -> None:
    source, path = places
    with mounted(Mirror(source), path):
        (path / "file").write_text("")
        before = (path / "file").stat().st_ino
    with mounted(Mirror(source), path):
        assert (path / "file").stat().st_ino == before


def test_leaving_while_a_file_is_open_says_so(places: tuple[Path, Path]) -> None:
    source, path = places
    (source / "file").write_text("x")
    with pytest.raises(StateError, match="still open"), mounted(Mirror(source), path):
        descriptor = os.open(path / "file", os.O_RDONLY)
    assert not is_mounted(path)
    assert os.read(descriptor, 10) == b"x"
    os.close(descriptor)
    for thread in threading.enumerate():
        if thread.name.startswith("fuse "):
            thread.join(10)
            assert not thread.is_alive()


def test_unmounting_what_is_busy_or_not_mounted(places: tuple[Path, Path]) -> None:
    source, path = places
    with pytest.raises(StateError, match="nothing is mounted"):
        unmount(path)
    with mounted(Mirror(source), path):
        with (path / "file").open("w"), pytest.raises(StateError, match="in use"):
            unmount(path)
        unmount(path)
    assert not is_mounted(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_unmounts_and_closes(places: tuple[Path, Path], number: signal.Signals) -> None:
    source, path = places
    with served(source, path) as process:
        (path / "file").write_text("kept")
        process.send_signal(number)
        assert process.wait(20) == 0
        assert rest_of(process) == ["destroyed", "ended"]
    assert not is_mounted(path)
    assert (source / "file").read_text() == "kept"


def test_a_signal_waits_for_open_files(places: tuple[Path, Path]) -> None:
    source, path = places
    with served(source, path) as process:
        with (path / "file").open("w") as stream:
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 20
            while is_mounted(path) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not is_mounted(path)
            stream.write("written after the signal")
        assert process.wait(20) == 0
    assert (source / "file").read_text() == "written after the signal"


def test_an_unmount_from_outside_ends_the_server(places: tuple[Path, Path]) -> None:
    source, path = places
    with served(source, path) as process:
        unmount(path)
        assert process.wait(20) == 0
        assert rest_of(process) == ["destroyed", "ended"]


def test_a_killed_server_leaves_a_stale_mount_that_can_be_cleared(
    places: tuple[Path, Path],
) -> None:
    source, path = places
    with served(source, path) as process:
        (path / "file").write_text("safe")
        descriptor = os.open(path / "file", os.O_RDONLY)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    with pytest.raises(OSError, match="not connected") as caught:
        os.statvfs(path)
    assert caught.value.errno == errno.ENOTCONN
    assert is_mounted(path)
    assert clear_stale_mount(path)
    assert not is_mounted(path)
    assert not clear_stale_mount(path)
    os.close(descriptor)
    assert (source / "file").read_text() == "safe"


def test_mounting_over_a_stale_mount_clears_it(places: tuple[Path, Path]) -> None:
    source, path = places
    (source / "file").write_text("again")
    with served(source, path) as process:
        process.kill()
        process.wait(20)
    with mounted(Mirror(source), path):
        assert (path / "file").read_text() == "again"
    assert not is_mounted(path)
    assert list(path.iterdir()) == []


def test_a_live_mount_is_not_cleared(places: tuple[Path, Path]) -> None:
    source, path = places
    with mounted(Mirror(source), path):
        assert not clear_stale_mount(path)
        assert is_mounted(path)


def test_a_process_that_cannot_make_its_file_system_says_why(places: tuple[Path, Path]) -> None:
    _, path = places
    factory = partial(Mirror, path / "none")
    with pytest.raises(StateError, match="ended before"), mounted_process(factory, path):
        pass
    assert not is_mounted(path)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_a_mount_the_kernel_refuses_is_said_as_such(places: tuple[Path, Path]) -> None:
    """Root in a user namespace of its own has the capability, but not over these mounts."""
    source, path = places
    script = source / "try.py"
    script.write_text(TRY)
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        sys.executable,
        *map(str, (script, source, path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr}")
    assert done.stdout.startswith("the kernel refuses to mount"), done
    assert not is_mounted(path)


def test_a_process_outlives_neither_its_block_nor_an_error_in_it(
    places: tuple[Path, Path],
) -> None:
    source, path = places
    with pytest.raises(ZeroDivisionError), mounted_process(partial(Mirror, source), path) as mount:  # noqa: PT012
        (path / "file").write_text("x")
        _ = 1 / 0
    assert not is_mounted(path)
    with pytest.raises(ProcessLookupError):
        os.kill(mount.pid, 0)


def test_a_process_killed_in_its_block_leaves_no_stale_mount(places: tuple[Path, Path]) -> None:
    source, path = places
    with mounted_process(partial(Mirror, source), path) as mount:
        (path / "file").write_text("x")
        os.kill(mount.pid, signal.SIGKILL)
    assert not is_mounted(path)
    assert list(path.iterdir()) == []


def test_a_process_follows_its_parent_into_death(places: tuple[Path, Path]) -> None:
    source, path = places
    parent = """
import sys, os, signal
from functools import partial
from pathlib import Path
from tierwise.archive.fuse import mounted_process
from tierwise.archive.fuse.mirror import Mirror

if __name__ == "__main__":
    with mounted_process(partial(Mirror, Path(sys.argv[1])), sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
"""
    script = source / "parent.py"
    script.write_text(parent)
    done = subprocess.run(
        [sys.executable, *map(str, (script, source, path))], check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while is_mounted(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_mounted(path)


def test_reasons_not_to_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "is_privileged", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "fusermount3 is not installed" in (can_mount() or "")
    monkeypatch.setattr(device, "DEVICE", tmp_path / "no-fuse")
    assert "is not there" in (can_mount() or "")
    with pytest.raises(AccessError), mounted(Mirror(tmp_path), tmp_path):
        pass
    monkeypatch.setattr(sys, "platform", "plan9")
    assert "needs Linux" in (can_mount() or "")


UNPRIVILEGED = """
import encodings.latin_1, encodings.unicode_escape, os, sys  # later they may be out of reach
from pathlib import Path
source, path = Path(sys.argv[1]), Path(sys.argv[2])
from tierwise.archive.fuse import can_mount, mounted
from tierwise.archive.fuse.mirror import Mirror
os.setgroups([]); os.setgid(65534); os.setuid(65534)
reason = can_mount()
assert reason is None, reason
with mounted(Mirror(source), path):
    assert " fuse.tierwise " in open("/proc/mounts").read()
    (path / "mine").write_text("x" * 100_000)
    (path / "mine").rename(path / "renamed")
    assert (path / "renamed").stat().st_uid == 65534
    assert (path / "renamed").read_text() == "x" * 100_000
    fd = os.open(path / "renamed", os.O_RDONLY); os.fsync(fd); os.close(fd)
print("fine")
"""


OPEN_DEVICE = """
set -e
mknod "$1/fuse" c 10 229
chmod 666 "$1/fuse"
mount --bind "$1/fuse" /dev/fuse
shift
exec "$@"
"""


@pytest.mark.usefixtures("needs_root")
@pytest.mark.skipif(shutil.which("fusermount3") is None, reason="fusermount3 is not installed")
def test_another_user_mounts_through_fusermount() -> None:
    """In a mount namespace of its own, whose /dev/fuse all may open, as udev has it."""
    base = Path(tempfile.mkdtemp(prefix="tierwise-fuse-"))
    base.chmod(0o755)
    for name in ("source", "mount"):
        (base / name).mkdir()
        os.chown(base / name, 65534, 65534)
    in_namespace = ["unshare", "--mount", "sh", "-c", OPEN_DEVICE, "sh", str(base)]
    program = [sys.executable, "-c", UNPRIVILEGED, str(base / "source"), str(base / "mount")]
    done = subprocess.run(
        in_namespace + program,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "fine\n", done.stderr
    assert (base / "source" / "renamed").read_text() == "x" * 100_000
    shutil.rmtree(base)
