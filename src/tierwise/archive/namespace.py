"""The tree in the catalogue: names, inodes, extended attributes; the metadata half of POSIX.

Everything here is SQL in one transaction per call; file contents are the business of `fs` and
`store`. Each change gives the inode a new sequence number and marks it dirty, so that the next
image's slice carries its new state to disc; a file that some slice knows leaves a tombstone when
its last name goes. Left out: permission checks, which the kernel makes (`operations`), and access
times of reads, which would turn every read into a write.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import NoReturn

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.operations import (
    MAX_NAME_BYTES,
    ROOT_INODE,
    Attributes,
    Caller,
    DirectoryEntry,
    RenameFlags,
    SetAttributes,
    XattrFlags,
    inherited_group,
)
from tierwise.archive.slices import path_of

_COLUMNS = "i.ino, mode, size, nlink, uid, gid, rdev, atime_ns, mtime_ns, ctime_ns"
_LISTING_ROWS = 1024


def fail(code: int) -> NoReturn:
    """Raise the `OSError` of an errno."""
    raise OSError(code, os.strerror(code))


def attributes_of(row: tuple[int, ...]) -> Attributes:
    """Return attributes from a row of inodes; blocks follow the logical size."""
    ino, mode, size, nlink, uid, gid, rdev, atime, mtime, ctime = row
    return Attributes(
        inode=ino,
        mode=mode,
        size=size,
        blocks=-(-size // 512),
        links=nlink,
        uid=uid,
        gid=gid,
        rdev=rdev,
        atime_ns=atime,
        mtime_ns=mtime,
        ctime_ns=ctime,
    )


class Namespace:
    """The tree of one archive; all methods raise only `OSError` (and the catalogue's own)."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def make_root(self, *, mode: int, uid: int, gid: int) -> None:
        """Make inode 1, once, for a new archive."""
        now = self.catalogue.clock()
        self.catalogue.insert(
            "INSERT INTO inodes (ino, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, seq)"
            " VALUES (1, ?, ?, ?, 2, ?, ?, ?, 0)",
            stat.S_IFDIR | mode, uid, gid, now, now, now,
        )  # fmt: skip

    # Looking

    def attributes(self, ino: int) -> Attributes:
        """Return an inode's attributes as the catalogue has them."""
        row = self.catalogue.one(f"SELECT {_COLUMNS} FROM inodes i WHERE ino = ?", ino)
        return fail(errno.ENOENT) if row is None else attributes_of(row)

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the attributes of what a name leads to."""
        row = self.catalogue.one(
            f"SELECT {_COLUMNS} FROM names n JOIN inodes i ON i.ino = n.ino"
            " WHERE n.parent = ? AND n.name = ?", parent, name,
        )  # fmt: skip
        if row is None:
            if not stat.S_ISDIR(self.attributes(parent).mode):
                fail(errno.ENOTDIR)
            fail(errno.ENAMETOOLONG if len(name) > MAX_NAME_BYTES else errno.ENOENT)
        return attributes_of(row)

    def entries(self, parent: int, cookie: int) -> Iterator[DirectoryEntry]:
        """Yield a directory's entries after a cookie, a page at a time, with attributes."""
        while True:
            rows = self.catalogue.all(
                f"SELECT n.cookie, n.name, {_COLUMNS} FROM names n JOIN inodes i ON i.ino = n.ino"
                " WHERE n.parent = ? AND n.cookie > ? ORDER BY n.cookie LIMIT ?",
                parent, cookie, _LISTING_ROWS,
            )  # fmt: skip
            for position, name, *columns in rows:
                found = attributes_of(tuple(columns))
                yield DirectoryEntry(
                    name=name, inode=found.inode, mode=found.mode, cookie=position, attributes=found
                )
            if len(rows) < _LISTING_ROWS:
                return
            cookie = rows[-1][0]

    def parent_of(self, ino: int) -> int:
        """Return a directory's parent; the root is its own."""
        found = self.catalogue.value("SELECT parent FROM names WHERE ino = ?", ino)
        return ROOT_INODE if found is None else int(found)

    def resolve(self, path: bytes) -> Attributes:
        """Return what a path leads to, not following symbolic links."""
        found = self.attributes(ROOT_INODE)
        for name in path.split(b"/"):
            if name in (b"", b"."):
                continue
            if not stat.S_ISDIR(found.mode):
                fail(errno.ENOTDIR)
            ino = self.parent_of(found.inode) if name == b".." else None
            found = self.lookup(found.inode, name) if ino is None else self.attributes(ino)
        return found

    def readlink(self, ino: int) -> bytes:
        """Return a symbolic link's target."""
        row = self.catalogue.one("SELECT target FROM inodes WHERE ino = ?", ino)
        if row is None:
            fail(errno.ENOENT)
        return fail(errno.EINVAL) if row[0] is None else bytes(row[0])

    # Changing

    def changed(self, ino: int, *, content: bool = False) -> None:
        """Give an inode a new sequence number and change time (`content`: and modify time)."""
        now, seq = self.catalogue.clock(), self.catalogue.next_seq(ino)
        mtime = ", mtime_ns = :now" if content else ""
        self.catalogue.run(
            f"UPDATE inodes SET seq = ?1, dirty = 1, ctime_ns = ?2{mtime.replace(':now', '?2')}"
            " WHERE ino = ?3", seq, now, ino,
        )  # fmt: skip

    def add(
        self, parent: int, name: bytes, mode: int, caller: Caller, *, rdev: int = 0,
        target: bytes | None = None,
    ) -> Attributes:  # fmt: skip
        """Make an inode with a name."""
        with self.catalogue.transaction():
            self._check_free(parent, name)
            ino = self._new_inode(self.attributes(parent), mode, caller, rdev, target)
            self._name(parent, name, ino)
            if stat.S_ISDIR(mode):
                self.catalogue.run("UPDATE inodes SET nlink = nlink + 1 WHERE ino = ?", parent)
            return self.attributes(ino)

    def add_nameless(self, parent: int, mode: int, caller: Caller) -> Attributes:
        """Make an inode without a name (O_TMPFILE)."""
        with self.catalogue.transaction():
            ino = self._new_inode(self.attributes(parent), mode, caller, 0, None)
            self.catalogue.run("UPDATE inodes SET nlink = 0 WHERE ino = ?", ino)
            return self.attributes(ino)

    def _new_inode(
        self, parent: Attributes, mode: int, caller: Caller, rdev: int, target: bytes | None
    ) -> int:
        if not stat.S_ISDIR(parent.mode):
            fail(errno.ENOTDIR)
        if parent.links == 0:
            fail(errno.ENOENT)
        mode, gid = inherited_group(parent, mode, caller)
        now, seq = self.catalogue.clock(), self.catalogue.next_seq()
        ino = self.catalogue.insert(
            "INSERT INTO inodes (mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns,"
            " target, seq) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            mode, caller.uid, gid, rdev, 2 if stat.S_ISDIR(mode) else 1,
            0 if target is None else len(target), now, now, now, target, seq,
        )  # fmt: skip
        self.catalogue.touched.add(ino)
        return ino

    def _check_free(self, parent: int, name: bytes) -> None:
        if len(name) > MAX_NAME_BYTES:
            fail(errno.ENAMETOOLONG)
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            fail(errno.EINVAL)
        if self._named(parent, name) is not None:
            fail(errno.EEXIST)

    def _named(self, parent: int, name: bytes) -> int | None:
        found = self.catalogue.value(
            "SELECT ino FROM names WHERE parent = ? AND name = ?", parent, name
        )
        return None if found is None else int(found)

    def _name(self, parent: int, name: bytes, ino: int) -> None:
        self.catalogue.insert(
            "INSERT INTO names (parent, name, ino) VALUES (?, ?, ?)", parent, name, ino
        )
        self.changed(parent, content=True)

    def link(self, ino: int, parent: int, name: bytes) -> Attributes:
        """Give a file another name."""
        with self.catalogue.transaction():
            self._check_free(parent, name)
            if stat.S_ISDIR(self.attributes(ino).mode):
                fail(errno.EPERM)
            self._name(parent, name, ino)
            self.catalogue.run("UPDATE inodes SET nlink = nlink + 1 WHERE ino = ?", ino)
            self.changed(ino)
            return self.attributes(ino)

    def unlink(self, parent: int, name: bytes) -> Attributes:
        """Remove a file's name; return the attributes left (links 0: free it when unused)."""
        with self.catalogue.transaction():
            found = self.lookup(parent, name)
            if stat.S_ISDIR(found.mode):
                fail(errno.EISDIR)
            return self._remove(parent, name, found)

    def rmdir(self, parent: int, name: bytes) -> Attributes:
        """Remove an empty directory."""
        with self.catalogue.transaction():
            found = self.lookup(parent, name)
            self._check_removable(found)
            return self._remove(parent, name, found)

    def _check_removable(self, found: Attributes) -> None:
        if not stat.S_ISDIR(found.mode):
            fail(errno.ENOTDIR)
        if self.catalogue.one("SELECT 1 FROM names WHERE parent = ? LIMIT 1", found.inode):
            fail(errno.ENOTEMPTY)

    def _remove(self, parent: int, name: bytes, found: Attributes) -> Attributes:
        directory = stat.S_ISDIR(found.mode)
        if directory or found.links == 1:
            self._bury(found.inode)
        self.catalogue.run("DELETE FROM names WHERE parent = ? AND name = ?", parent, name)
        left = "0" if directory else "nlink - 1"
        self.catalogue.run(f"UPDATE inodes SET nlink = {left} WHERE ino = ?", found.inode)
        if directory:
            self.catalogue.run("UPDATE inodes SET nlink = nlink - 1 WHERE ino = ?", parent)
        self.changed(found.inode)
        self.changed(parent, content=True)
        return self.attributes(found.inode)

    def _bury(self, ino: int) -> None:
        """Leave a tombstone if any disc may know the inode; called while it still has its name."""
        if self.catalogue.value("SELECT recorded FROM inodes WHERE ino = ?", ino):
            self.catalogue.run(
                "INSERT OR REPLACE INTO tombstones (ino, path, deleted_ns, seq)"
                " VALUES (?, ?, ?, ?)",
                ino, path_of(self.catalogue, ino) or b"", self.catalogue.clock(),
                self.catalogue.next_seq(),
            )  # fmt: skip

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: RenameFlags
    ) -> Attributes | None:
        """Move a name; return the attributes left to what it replaced, if anything."""
        if flags & ~(RenameFlags.NO_REPLACE | RenameFlags.EXCHANGE):
            fail(errno.EINVAL)
        if len(new_name) > MAX_NAME_BYTES:
            fail(errno.ENAMETOOLONG)
        with self.catalogue.transaction():
            moved = self.lookup(parent, name)
            taken = self._named(new_parent, new_name)
            if flags & RenameFlags.EXCHANGE:
                if taken is None:
                    fail(errno.ENOENT)
                self._exchange((parent, name, moved), (new_parent, new_name), taken)
                return None
            if taken is not None and flags & RenameFlags.NO_REPLACE:
                fail(errno.EEXIST)
            if taken == moved.inode:
                return None
            return self._move(moved, parent, name, new_parent, new_name)

    def _move(
        self, moved: Attributes, parent: int, name: bytes, new_parent: int, new_name: bytes
    ) -> Attributes | None:
        self._check_no_loop(moved, new_parent)
        replaced = None
        if self._named(new_parent, new_name) is not None:
            old = self.lookup(new_parent, new_name)
            if stat.S_ISDIR(moved.mode):
                self._check_removable(old)
            elif stat.S_ISDIR(old.mode):
                fail(errno.EISDIR)
            replaced = self._remove(new_parent, new_name, old)
        self.catalogue.run("DELETE FROM names WHERE parent = ? AND name = ?", parent, name)
        self._name(new_parent, new_name, moved.inode)
        self.changed(moved.inode)
        self.changed(parent, content=True)
        if stat.S_ISDIR(moved.mode) and parent != new_parent:
            self.catalogue.run("UPDATE inodes SET nlink = nlink - 1 WHERE ino = ?", parent)
            self.catalogue.run("UPDATE inodes SET nlink = nlink + 1 WHERE ino = ?", new_parent)
        return replaced

    def _exchange(
        self, one: tuple[int, bytes, Attributes], other: tuple[int, bytes], taken: int
    ) -> None:
        (parent, name, moved), (new_parent, new_name) = one, other
        second = self.attributes(taken)
        self._check_no_loop(moved, new_parent)
        self._check_no_loop(second, parent)
        for folder, label, ino in ((parent, name, taken), (new_parent, new_name, moved.inode)):
            self.catalogue.run(
                "UPDATE names SET ino = ? WHERE parent = ? AND name = ?", ino, folder, label
            )
        shift = int(stat.S_ISDIR(second.mode)) - int(stat.S_ISDIR(moved.mode))
        for folder, delta in ((parent, shift), (new_parent, -shift)):
            self.catalogue.run("UPDATE inodes SET nlink = nlink + ? WHERE ino = ?", delta, folder)
            self.changed(folder, content=True)
        for ino in (moved.inode, taken):
            self.changed(ino)

    def _check_no_loop(self, moved: Attributes, new_parent: int) -> None:
        """Refuse a directory moved into itself; the kernel does too, library callers may not."""
        if self.attributes(new_parent).links == 0:
            fail(errno.ENOENT)
        while stat.S_ISDIR(moved.mode) and new_parent != ROOT_INODE:
            if new_parent == moved.inode:
                fail(errno.EINVAL)
            new_parent = self.parent_of(new_parent)

    def setattr(self, ino: int, changes: SetAttributes) -> None:
        """Change everything but the size."""
        now, fields = self.catalogue.clock(), []
        values: list[int] = []
        for name in ("uid", "gid", "atime_ns", "mtime_ns"):
            value = getattr(changes, name)
            if value is not None:
                fields.append(f"{name} = ?")
                values.append(value)
        if changes.mode is not None:
            fields.append("mode = (mode & ~4095) | ?")
            values.append(changes.mode & 0o7777)
        with self.catalogue.transaction():
            fields += ["ctime_ns = ?", "seq = ?", "dirty = 1"]
            values += [changes.ctime_ns or now, self.catalogue.next_seq(ino)]
            self.catalogue.run(f"UPDATE inodes SET {', '.join(fields)} WHERE ino = ?", *values, ino)

    # Extended attributes

    def getxattr(self, ino: int, name: bytes) -> bytes:
        """Return the value of an extended attribute."""
        value = self.catalogue.value(
            "SELECT value FROM xattrs WHERE ino = ? AND name = ?", ino, name
        )
        return fail(errno.ENODATA) if value is None else bytes(value)

    def setxattr(self, ino: int, name: bytes, value: bytes, flags: XattrFlags) -> None:
        """Set an extended attribute."""
        if len(name) > MAX_NAME_BYTES:
            fail(errno.ERANGE)
        with self.catalogue.transaction():
            there = self.catalogue.one("SELECT 1 FROM xattrs WHERE ino = ? AND name = ?", ino, name)
            if there and flags & XattrFlags.CREATE:
                fail(errno.EEXIST)
            if not there and flags & XattrFlags.REPLACE:
                fail(errno.ENODATA)
            self.catalogue.run("INSERT OR REPLACE INTO xattrs VALUES (?, ?, ?)", ino, name, value)
            self.changed(ino)

    def listxattr(self, ino: int) -> list[bytes]:
        """Return the names of an inode's extended attributes."""
        rows = self.catalogue.all("SELECT name FROM xattrs WHERE ino = ? ORDER BY name", ino)
        return [bytes(row[0]) for row in rows]

    def removexattr(self, ino: int, name: bytes) -> None:
        """Remove an extended attribute."""
        with self.catalogue.transaction():
            if not self.catalogue.run("DELETE FROM xattrs WHERE ino = ? AND name = ?", ino, name):
                fail(errno.ENODATA)
            self.changed(ino)
