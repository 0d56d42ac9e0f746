"""The front end: the kernel's FUSE protocol, spoken from Python without libfuse.

```
mount      mounted / mounted_process / serve: a file system at a directory, for a while
device     mount(2) or fusermount3 -> a connection; unmount; stale mounts; read-ahead
negotiate  INIT: what both sides do
server     the loop: request -> handler -> reply; waits aside; faults become EIO
  names, attributes, files, directories    one handler a request
session    references, open files, timeouts of one mount
openfiles  passthrough or served, fixed while an inode is open
acl        POSIX ACLs and permission bits kept equal
notify     the file system's changes -> the kernel's caches
wire       structures, opcodes, flags
mirror     a directory served again: the reference file system
```

It knows nothing of archives: a file system is an `operations.Operations`. Protocol facts and the
table of deviations from POSIX are in docs/fuse.md.
"""

from tierwise.archive.fuse.device import can_mount, clear_stale_mount, unmount
from tierwise.archive.fuse.mount import MountProcess, mounted, mounted_process, serve
from tierwise.archive.fuse.server import Fault, log_fault
from tierwise.archive.fuse.session import MountOptions

__all__ = [
    "Fault",
    "MountOptions",
    "MountProcess",
    "can_mount",
    "clear_stale_mount",
    "log_fault",
    "mounted",
    "mounted_process",
    "serve",
    "unmount",
]
