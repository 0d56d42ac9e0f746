"""Getting a connection to the kernel at a mount point, and taking it away again.

Root (CAP_SYS_ADMIN) opens /dev/fuse and calls mount(2). Others ask `fusermount3`, which mounts
for them and hands the descriptor back over a socket. Left out: `fuseblk`, user namespaces,
`auto_unmount` (a dead server's mount is cleared by `clear_stale_mount`).
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

from tierwise.archive.fuse import system
from tierwise.archive.fuse.session import MountOptions
from tierwise.archive.fuse.system import MountFlag, UnmountFlag
from tierwise.core.errors import AccessError, MissingFileError, StateError, UsageError

DEVICE: Final = Path("/dev/fuse")
_CAP_SYS_ADMIN: Final = 21
_HINT: Final = "run as root; or apt-get install fuse3, and chmod 666 /dev/fuse if it is not so"


def is_privileged() -> bool:
    """Return whether this process may call mount(2) and register backing files."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def can_mount() -> str | None:
    """Return a sentence why this process cannot mount a FUSE file system, or None if it can.

    A container may still forbid mount(2) itself; that shows only when it is tried.
    """
    if sys.platform != "linux":
        return "mounting needs Linux: FUSE is spoken with its kernel"
    if not DEVICE.exists():
        return f"{DEVICE} is not there: the kernel has no FUSE, or a container hides it"
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"{DEVICE} may not be opened by this user"
    if is_privileged():
        return None
    if shutil.which("fusermount3") is None:
        return "only root may mount, and fusermount3 is not installed"
    return None


def connect(mountpoint: Path, options: MountOptions) -> int:
    """Mount at a directory and return the descriptor of the connection.

    Raises:
        MissingFileError: The directory does not exist.
        UsageError: It is not a directory.
        AccessError: The system refuses.
    """
    reason = can_mount()
    if reason is not None:
        raise AccessError(reason, hint=_HINT)
    _check_directory(mountpoint)
    if is_privileged():
        return _mount(mountpoint, options)
    return _ask_fusermount(mountpoint, options)


def _check_directory(mountpoint: Path) -> None:
    try:
        found = mountpoint.stat()
    except FileNotFoundError as error:
        raise MissingFileError(f"mount point {mountpoint} does not exist") from error
    except PermissionError as error:
        raise AccessError(f"mount point {mountpoint} may not be looked at") from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"mount point {mountpoint} is not a directory")


def _mount(mountpoint: Path, options: MountOptions) -> int:
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise AccessError(f"cannot open {DEVICE}: {error.strerror}") from error
    flags = MountFlag.NO_SUID | MountFlag.NO_DEVICES
    if options.read_only:
        flags |= MountFlag.READ_ONLY
    data = f"fd={device},rootmode=40755,user_id={os.getuid()},group_id={os.getgid()}"
    data += ",default_permissions" + ("" if options.allow_other is False else ",allow_other")
    try:
        system.mount(
            options.source or options.name, mountpoint, f"fuse.{options.name}", flags, data
        )
    except OSError as error:
        os.close(device)
        raise AccessError(
            f"the kernel refuses to mount at {mountpoint}: {error.strerror}",
            hint="a container needs CAP_SYS_ADMIN and a seccomp profile that allows mount(2)",
        ) from error
    return device


def _ask_fusermount(mountpoint: Path, options: MountOptions) -> int:
    words = [f"fsname={options.source or options.name}", f"subtype={options.name}"]
    words += ["default_permissions", "nosuid", "nodev"]
    words += ["allow_other"] if options.allow_other else []
    words += ["ro"] if options.read_only else []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            ["fusermount3", "-o", ",".join(words), "--", str(mountpoint)],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = done.stderr.strip() or f"fusermount3 ended with {done.returncode}"
            raise AccessError(f"cannot mount at {mountpoint}: {said}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def unmount(mountpoint: Path, *, lazy: bool = False) -> None:
    """Unmount a directory.

    Args:
        mountpoint: Where the file system is mounted.
        lazy: Take it out of the tree at once, even if files are open; it lives until they close.

    Raises:
        StateError: It is in use, or nothing is mounted there.
        AccessError: The system refuses.
    """
    if is_privileged():
        flags = UnmountFlag.NO_FOLLOW | (UnmountFlag.DETACH if lazy else UnmountFlag.NONE)
        try:
            system.unmount(mountpoint, flags)
        except OSError as error:
            raise _unmount_error(mountpoint, error.errno or 0, error.strerror or "") from error
        return
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(mountpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip()
        code = errno.EBUSY if "busy" in said else errno.EINVAL if "not found" in said else 0
        raise _unmount_error(mountpoint, code, said)


def _unmount_error(mountpoint: Path, code: int, said: str) -> StateError | AccessError:
    if code == errno.EBUSY:
        return StateError(f"{mountpoint} is in use", hint="close its files, or unmount lazily")
    if code in (errno.EINVAL, errno.ENOENT):
        return StateError(f"nothing is mounted at {mountpoint}")
    return AccessError(f"cannot unmount {mountpoint}: {said}")


def clear_stale_mount(mountpoint: Path) -> bool:
    """Unmount a directory whose server died (ENOTCONN); return whether there was one to clear.

    Asked by statfs(2), which the kernel never answers from its caches as it does stat(2).
    """
    try:
        os.statvfs(mountpoint)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            return False
        unmount(mountpoint, lazy=True)
        return True
    return False


def set_read_ahead(mountpoint: Path, read_ahead_kib: int) -> bool:
    """Set the read-ahead window of a mount; return whether the system let us.

    INIT can only lower the window; raising it goes through the backing device's entry in sysfs.
    """
    number = _device_number(mountpoint)
    if number is None:
        return False
    try:
        entry = Path(f"/sys/class/bdi/{number}/read_ahead_kb")
        entry.write_text(f"{read_ahead_kib}\n", encoding="ascii")
    except OSError:
        return False
    return True


def _device_number(mountpoint: Path) -> str | None:
    """Return major:minor of the topmost mount at a directory, without touching the mount."""
    wanted = os.fsencode(mountpoint)
    found = None
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = line.split(b" ")
        if fields[4].decode("unicode_escape").encode("latin-1") == wanted:
            found = fields[2].decode("ascii")
    return found
