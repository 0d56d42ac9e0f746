"""Rights: the kernel checks, the front end keeps bits and ACLs right. Other users are real ones."""

from __future__ import annotations

import errno
import os
import stat
import struct
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tierwise.archive.fuse import acl
from tierwise.archive.fuse.acl import Entry, Tag

pytestmark = pytest.mark.usefixtures("needs_root")
ALICE, BOB, STAFF = 4001, 4002, 4100


def as_user(uid: int, gid: int, call: Callable[[], object], groups: tuple[int, ...] = ()) -> int:
    """Return the errno that a call gives another user (0: none), in a child process."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            os.umask(0o022)
            call()
            code = 0
        except OSError as error:
            code = error.errno or 254
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_a_user_makes_is_theirs(folder: Path) -> None:
    folder.chmod(0o777)

    def make() -> None:
        (folder / "file").write_text("x")
        (folder / "dir").mkdir()
        (folder / "link").symlink_to("file")
        os.mkfifo(folder / "fifo")

    assert as_user(ALICE, STAFF, make) == 0
    for name in ("file", "dir", "link", "fifo"):
        found = (folder / name).lstat()
        assert (found.st_uid, found.st_gid) == (ALICE, STAFF)
    assert mode_of(folder / "file") == 0o644
    assert mode_of(folder / "dir") == 0o755


def test_bits_are_obeyed(folder: Path) -> None:
    path = folder / "secret"
    path.write_text("s")
    path.chmod(0o600)
    assert as_user(ALICE, STAFF, path.read_text) == errno.EACCES
    assert as_user(ALICE, STAFF, lambda: path.write_text("")) == errno.EACCES
    assert as_user(ALICE, STAFF, (folder / "d").mkdir) == errno.EACCES
    assert as_user(ALICE, STAFF, lambda: path.chmod(0o666)) == errno.EPERM
    assert as_user(ALICE, STAFF, lambda: os.chown(path, ALICE, -1)) == errno.EPERM
    os.chown(path, BOB, STAFF)
    path.chmod(0o640)
    assert as_user(ALICE, STAFF, path.read_text) == 0
    assert as_user(ALICE, ALICE, path.read_text, (STAFF,)) == 0
    assert as_user(ALICE, ALICE, path.read_text) == errno.EACCES
    folder.chmod(0o700)
    assert as_user(ALICE, STAFF, path.stat) == errno.EACCES


def test_a_sticky_directory_protects_names(folder: Path) -> None:
    folder.chmod(0o1777)
    assert as_user(ALICE, ALICE, lambda: (folder / "hers").write_text("")) == 0
    assert as_user(BOB, BOB, (folder / "hers").unlink) in (errno.EPERM, errno.EACCES)
    moved = as_user(BOB, BOB, lambda: (folder / "hers").rename(folder / "his"))
    assert moved in (errno.EPERM, errno.EACCES)
    assert as_user(ALICE, ALICE, (folder / "hers").unlink) == 0


def test_a_set_group_directory_hands_its_group_down(folder: Path) -> None:
    os.chown(folder, 0, STAFF)
    folder.chmod(0o2777)

    def make() -> None:
        (folder / "file").write_text("")
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("")

    assert as_user(ALICE, ALICE, make) == 0
    assert (folder / "file").stat().st_gid == STAFF
    assert (folder / "sub").stat().st_gid == STAFF
    assert mode_of(folder / "sub") == 0o2755
    assert (folder / "sub" / "file").stat().st_gid == STAFF
    assert mode_of(folder / "file") == 0o644


@pytest.mark.parametrize("change", ["write", "truncate", "chown"])
def test_set_id_bits_go_when_somebody_else_changes_a_file(folder: Path, change: str) -> None:
    path = folder / "tool"
    path.write_bytes(b"#!" + bytes(100))
    os.chown(path, ALICE if change == "chown" else BOB, STAFF)
    path.chmod(0o6777)

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY)
        os.write(descriptor, b"changed")
        os.close(descriptor)

    changes: dict[str, Callable[[], object]] = {
        "write": write,
        "truncate": lambda: os.truncate(path, 3),
        "chown": lambda: os.chown(path, -1, STAFF),
    }
    assert as_user(ALICE, STAFF, changes[change]) == 0
    assert mode_of(path) == 0o777


@pytest.mark.parametrize("change", ["write", "truncate", "chown"])
def test_a_file_capability_goes_when_somebody_else_changes_a_file(
    folder: Path, change: str
) -> None:
    path = folder / "tool"
    path.write_bytes(b"#!" + bytes(100))
    path.chmod(0o777)
    os.chown(path, ALICE if change == "chown" else BOB, STAFF)
    net_raw = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
    os.setxattr(path, "security.capability", net_raw)

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY)
        os.write(descriptor, b"changed")
        os.close(descriptor)

    changes: dict[str, Callable[[], object]] = {
        "write": write,
        "truncate": lambda: os.truncate(path, 3),
        "chown": lambda: os.chown(path, -1, STAFF),
    }
    assert as_user(ALICE, STAFF, changes[change]) == 0
    assert "security.capability" not in os.listxattr(path)


def test_the_owner_of_a_symlink_changes_and_nothing_else(folder: Path) -> None:
    link = folder / "link"
    link.symlink_to("target")
    os.chown(link, ALICE, STAFF, follow_symlinks=False)
    found = link.lstat()
    assert (found.st_uid, found.st_gid) == (ALICE, STAFF)
    assert stat.S_ISLNK(found.st_mode)
    assert mode_of(link) == 0o777


def test_root_keeps_set_id_bits_when_writing(folder: Path) -> None:
    path = folder / "tool"
    path.write_bytes(b"")
    path.chmod(0o4755)
    with path.open("r+b") as stream:
        stream.write(b"x")
    assert mode_of(path) == 0o4755


def full_acl(*, user: int, permissions: int, mask: int = 7) -> bytes:
    return acl.encode(
        (
            Entry(tag=Tag.USER_OBJ, permissions=6),
            Entry(tag=Tag.USER, permissions=permissions, identifier=user),
            Entry(tag=Tag.GROUP_OBJ, permissions=4),
            Entry(tag=Tag.MASK, permissions=mask),
            Entry(tag=Tag.OTHER, permissions=0),
        )
    )


def set_acl(path: Path, value: bytes, kind: bytes = acl.ACCESS) -> None:
    os.setxattr(path, kind, value)


def test_an_acl_lets_a_named_user_in_and_its_mask_keeps_them_out(folder: Path) -> None:
    path = folder / "shared"
    path.write_text("s")
    set_acl(path, full_acl(user=ALICE, permissions=6))
    assert mode_of(path) == 0o670
    assert as_user(ALICE, ALICE, lambda: path.write_text("alice")) == 0
    assert as_user(BOB, BOB, path.read_text) == errno.EACCES
    path.chmod(0o640)
    assert as_user(ALICE, ALICE, lambda: path.write_text("no")) == errno.EACCES
    assert as_user(ALICE, ALICE, path.read_text) == 0
    found = acl.parse(os.getxattr(path, acl.ACCESS))
    assert next(entry.permissions for entry in found if entry.tag is Tag.MASK) == 4
    os.removexattr(path, acl.ACCESS)
    assert as_user(ALICE, ALICE, path.read_text) == errno.EACCES


def test_a_default_acl_is_inherited_in_place_of_the_umask(folder: Path) -> None:
    set_acl(folder, full_acl(user=ALICE, permissions=7), acl.DEFAULT)
    os.umask(0o077)
    try:
        (folder / "file").write_text("inherited")
        (folder / "sub").mkdir()
        (folder / "sub" / "deep").write_text("")
    finally:
        os.umask(0o022)
    assert mode_of(folder / "file") == 0o660
    entries = acl.parse(os.getxattr(folder / "file", acl.ACCESS))
    assert Entry(tag=Tag.USER, permissions=7, identifier=ALICE) in entries
    assert os.getxattr(folder / "sub", acl.DEFAULT) == os.getxattr(folder, acl.DEFAULT)
    assert acl.ACCESS.decode() in os.listxattr(folder / "sub" / "deep")
    assert as_user(ALICE, ALICE, (folder / "file").read_text) == 0


def test_without_a_default_acl_the_umask_holds(folder: Path) -> None:
    old = os.umask(0o027)
    try:
        (folder / "file").write_text("")
        (folder / "sub").mkdir()
        os.mkfifo(folder / "fifo", 0o666)
    finally:
        os.umask(old)
    assert [mode_of(folder / name) for name in ("file", "sub", "fifo")] == [0o640, 0o750, 0o640]


def test_a_minimal_acl_is_only_a_mode(folder: Path) -> None:
    path = folder / "f"
    path.write_text("")
    set_acl(path, acl.encode(acl.mode_to_acl(0o604)))
    assert mode_of(path) == 0o604
    assert os.listxattr(path) == []


def test_a_malformed_acl_is_refused(folder: Path) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        set_acl(folder, struct.pack("<I", 2) + b"xyz")
