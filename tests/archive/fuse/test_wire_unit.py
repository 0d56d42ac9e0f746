"""The bytes of the protocol, INIT and ACLs, without a kernel."""

from __future__ import annotations

import errno
import stat
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierwise.archive.fuse import acl, directories, wire
from tierwise.archive.fuse.acl import Entry, Tag
from tierwise.archive.fuse.names import HANDLERS as NAME_HANDLERS
from tierwise.archive.fuse.negotiate import agree
from tierwise.archive.fuse.session import MountOptions, Request, Session
from tierwise.archive.fuse.wire import Init
from tierwise.archive.operations import (
    Attributes,
    Caller,
    DirectoryEntry,
    FileSystemStatistics,
    Operations,
    inherited_group,
)

HEADER = Path("/usr/include/linux/fuse.h")
STRUCTURES = {
    "fuse_in_header": wire.IN_HEADER,
    "fuse_out_header": wire.OUT_HEADER,
    "fuse_init_out": wire.INIT_OUT,
    "fuse_forget_one": wire.FORGET_ONE,
    "fuse_setattr_in": wire.SETATTR_IN,
    "fuse_mknod_in": wire.MKNOD_IN,
    "fuse_mkdir_in": wire.MKDIR_IN,
    "fuse_create_in": wire.CREATE_IN,
    "fuse_rename2_in": wire.RENAME2_IN,
    "fuse_read_in": wire.READ_IN,
    "fuse_write_in": wire.WRITE_IN,
    "fuse_write_out": wire.WRITE_OUT,
    "fuse_release_in": wire.RELEASE_IN,
    "fuse_flush_in": wire.FLUSH_IN,
    "fuse_fsync_in": wire.FSYNC_IN,
    "fuse_setxattr_in": wire.SETXATTR_EXT_IN,
    "fuse_getxattr_in": wire.GETXATTR_IN,
    "fuse_fallocate_in": wire.FALLOCATE_IN,
    "fuse_lseek_in": wire.LSEEK_IN,
    "fuse_copy_file_range_in": wire.COPY_FILE_RANGE_IN,
    "fuse_open_out": wire.OPEN_OUT,
    "fuse_statfs_out": wire.STATFS_OUT,
    "fuse_notify_inval_inode_out": wire.INVALIDATE_INODE_OUT,
    "fuse_notify_inval_entry_out": wire.INVALIDATE_ENTRY_OUT,
}


@pytest.mark.skipif(not HEADER.exists(), reason="the kernel's header is not installed")
def test_every_structure_has_the_size_the_kernels_header_says(tmp_path: Path) -> None:
    lines = "".join(f'printf("%zu\\n", sizeof(struct {name}));' for name in STRUCTURES)
    source = tmp_path / "sizes.c"
    source.write_text(
        f"#include <stdio.h>\n#include <linux/fuse.h>\nint main(void) {{ {lines} return 0; }}"
    )
    try:
        subprocess.run(["cc", "-o", tmp_path / "sizes", source], check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    found = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True)
    sizes = dict(zip(STRUCTURES, map(int, found.stdout.split()), strict=True))
    assert sizes == {name: layout.size for name, layout in STRUCTURES.items()}


def init_body(*, major: int = 7, minor: int = 45, flags: int = (1 << 64) - 1) -> memoryview:
    body = struct.pack("<IIIII44x", major, minor, 131072, flags & 0xFFFFFFFF, flags >> 32)
    return memoryview(body)


def test_init_claims_only_what_is_offered_and_wanted() -> None:
    everything = agree(init_body(), MountOptions(), privileged=True)
    assert Init.PASSTHROUGH in everything.capabilities
    assert Init.POSIX_ACL in everything.capabilities
    fields = wire.INIT_OUT.unpack(everything.reply)
    assert fields[:3] == (7, 45, 1 << 20)
    assert fields[3] | fields[10] << 32 == everything.capabilities
    assert fields[6] == 1 << 20
    assert fields[11] == 1
    assert not fields[3] & 1 << 16, "no writeback cache: it excludes passthrough"
    nothing = agree(init_body(flags=0), MountOptions(), privileged=True)
    assert nothing.capabilities == 0
    assert wire.INIT_OUT.unpack(nothing.reply)[11] == 0


def test_init_without_root_or_wish_leaves_passthrough_out() -> None:
    assert Init.PASSTHROUGH not in agree(init_body(), MountOptions(), privileged=False).capabilities
    unwanted = agree(init_body(), MountOptions(passthrough=False, acl=False), privileged=True)
    assert not unwanted.capabilities & (Init.PASSTHROUGH | Init.POSIX_ACL | Init.DONT_MASK)


def test_the_high_flags_count_only_with_init_ext() -> None:
    without = agree(
        init_body(flags=((1 << 64) - 1) & ~Init.INIT_EXT), MountOptions(), privileged=True
    )
    assert without.capabilities >> 32 == 0


def test_a_newer_kernel_is_answered_with_what_we_know_and_an_older_one_refused() -> None:
    assert (
        wire.INIT_OUT.unpack(agree(init_body(minor=99), MountOptions(), privileged=True).reply)[1]
        == 45
    )
    for old in (
        init_body(minor=12),
        init_body(major=6),
        memoryview(struct.pack("<IIII", 7, 8, 0, 0)),
    ):
        with pytest.raises(OSError, match="speaks FUSE") as caught:
            agree(old, MountOptions(), privileged=True)
        assert caught.value.errno == errno.EPROTO


def test_times_before_1970_keep_their_nanoseconds() -> None:
    reply = wire.attributes_reply(Attributes(inode=3, mode=0, mtime_ns=-1), 1_500_000_000)
    valid, valid_ns = struct.unpack_from("<QI", reply)
    assert (valid, valid_ns) == (1, 500_000_000)
    mtime, mtime_ns = (
        struct.unpack_from("<q", reply, 16 + 32)[0],
        struct.unpack_from("<I", reply, 16 + 52)[0],
    )
    assert (mtime, mtime_ns) == (-1, 999_999_999)


class Listed(Operations):
    """A directory of given names."""

    def __init__(self, names: list[bytes]) -> None:
        self.names = names
        self.forgotten: list[int] = []

    def forget(self, inode: int) -> None:
        self.forgotten.append(inode)

    def readdir(self, inode: int, handle: int, cookie: int, *, plus: bool) -> list[DirectoryEntry]:
        return [
            DirectoryEntry(
                name=name,
                inode=100 + index,
                mode=stat.S_IFREG,
                cookie=index,
                attributes=Attributes(inode=100 + index, mode=stat.S_IFREG) if plus else None,
            )
            for index, name in enumerate(self.names, start=1)
            if index > cookie
        ]


def request(opcode: wire.Opcode, body: bytes, inode: int = 1) -> Request:
    header = wire.IN_HEADER.pack(40 + len(body), opcode, 9, inode, 0, 0, 0, 0, 0)
    return Request(memoryview(header + body))


def entries_of(reply: bytes, *, plus: bool) -> list[tuple[bytes, int]]:
    found = []
    while reply:
        start = wire.ENTRY_OUT_BYTES if plus else 0
        _, offset, length, _ = struct.unpack_from("<QQII", reply, start)
        name = reply[start + 24 : start + 24 + length]
        found.append((name, offset))
        reply = reply[wire.directory_entry_bytes(name, plus=plus) :]
    return found


@given(
    names=st.lists(st.binary(min_size=1, max_size=255), max_size=30, unique=True),
    size=st.integers(450, 2000),
    plus=st.booleans(),
)
def test_a_listing_in_pieces_has_every_name_once(names: list[bytes], size: int, plus: bool) -> None:
    operations = Listed(names)
    session = Session(operations, -1, MountOptions(), lambda: 0)
    opcode = wire.Opcode.READDIRPLUS if plus else wire.Opcode.READDIR
    seen: list[bytes] = []
    position = 0
    for _ in range(100):
        body = wire.READ_IN.pack(5, position, size, 0, 0, 0, 0)
        reply = directories.readdir(session, operations, request(opcode, body))
        assert len(reply) <= size
        found = entries_of(reply, plus=plus)
        if not found:
            break
        seen += [name for name, _ in found]
        position = found[-1][1]
    assert seen == [b".", b"..", *names]
    if plus:
        assert set(session.references()) == {101 + index for index in range(len(names))}


@given(references=st.lists(st.integers(1, 5), max_size=20), data=st.data())
def test_references_are_counted(references: list[int], data: st.DataObject) -> None:
    operations = Listed([])
    session = Session(operations, -1, MountOptions(), lambda: 0)
    for inode, count in enumerate(references, start=2):
        for _ in range(count):
            session.entry(Attributes(inode=inode, mode=stat.S_IFREG))
    for inode, count in enumerate(references, start=2):
        first = data.draw(st.integers(0, count))
        body = wire.FORGET_IN.pack(first)
        NAME_HANDLERS[wire.Opcode.FORGET](
            session, operations, request(wire.Opcode.FORGET, body, inode)
        )
        assert (inode in operations.forgotten) == (first == count)
        if first < count:
            many = wire.BATCH_FORGET_IN.pack(1) + wire.FORGET_ONE.pack(inode, count - first)
            NAME_HANDLERS[wire.Opcode.BATCH_FORGET](
                session, operations, request(wire.Opcode.BATCH_FORGET, many)
            )
    assert sorted(operations.forgotten) == list(range(2, 2 + len(references)))
    assert session.references() == {}


def test_statistics_reach_the_kernel_in_its_order() -> None:
    statistics = FileSystemStatistics(
        blocks=1, blocks_free=2, blocks_available=3, files=4, files_free=5, block_size=512
    )
    assert struct.unpack_from("<QQQQQIII", wire.statistics_reply(statistics)) == (
        1, 2, 3, 4, 5, 512, 255, 512,
    )  # fmt: skip


PERMISSIONS = st.integers(0, 7)
FULL_ACLS = st.builds(
    lambda o, u, g, m, other, users: (
        Entry(tag=Tag.USER_OBJ, permissions=o),
        *(Entry(tag=Tag.USER, permissions=u, identifier=user) for user in sorted(users)),
        Entry(tag=Tag.GROUP_OBJ, permissions=g),
        Entry(tag=Tag.MASK, permissions=m),
        Entry(tag=Tag.OTHER, permissions=other),
    ),
    PERMISSIONS, PERMISSIONS, PERMISSIONS, PERMISSIONS, PERMISSIONS,
    st.sets(st.integers(0, 2**32 - 2), min_size=1, max_size=4),
)  # fmt: skip


@given(entries=FULL_ACLS)
def test_an_acl_survives_its_encoding(entries: acl.Acl) -> None:
    assert acl.parse(acl.encode(entries)) == entries
    assert not acl.is_minimal(entries)


@given(entries=FULL_ACLS, mode=st.integers(0, 0o7777))
def test_chmod_and_acl_say_the_same(entries: acl.Acl, mode: int) -> None:
    changed = acl.change_mode(entries, mode)
    assert acl.apply_to_mode(changed, mode) == mode
    named = [entry for entry in changed if entry.tag in (Tag.USER, Tag.GROUP_OBJ)]
    assert named == [entry for entry in entries if entry.tag in (Tag.USER, Tag.GROUP_OBJ)]


@given(mode=st.integers(0, 0o7777))
def test_a_minimal_acl_is_its_mode(mode: int) -> None:
    entries = acl.mode_to_acl(mode)
    assert acl.is_minimal(entries)
    assert acl.apply_to_mode(entries, mode & 0o7000) == mode


@given(entries=FULL_ACLS, mode=st.integers(0, 0o777))
def test_inheritance_never_gives_more_than_asked(entries: acl.Acl, mode: int) -> None:
    made, access = acl.inherit(entries, stat.S_IFREG | mode)
    assert stat.S_IFMT(made) == stat.S_IFREG
    assert stat.S_IMODE(made) & ~mode == 0
    assert acl.apply_to_mode(access, made) == made


@pytest.mark.parametrize(
    "value", [b"", b"\2\0", struct.pack("<I", 2) + b"1234567", struct.pack("<IHHI", 2, 3, 0, 0)]
)
def test_a_malformed_acl_has_an_errno(value: bytes) -> None:
    with pytest.raises(OSError, match="malformed") as caught:
        acl.parse(value)
    assert caught.value.errno == errno.EINVAL


def test_a_plain_directory_hands_nothing_down() -> None:
    parent = Attributes(inode=1, mode=stat.S_IFDIR | 0o755, gid=50)
    assert inherited_group(parent, 0o644, Caller(uid=1, gid=2, pid=3)) == (0o644, 2)
