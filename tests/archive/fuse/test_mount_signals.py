"""Ctrl-C reaches the process that serves a mount too; it unmounts quietly, at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tierwise.archive.fuse import can_mount
from tierwise.archive.fuse.mount import _signals_held

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(can_mount() is not None, reason=can_mount() or "FUSE is allowed"),
]

CODE = """
import sys, time
from functools import partial
from pathlib import Path
from tierwise.archive.fuse import mounted_process
from tierwise.archive.fuse.mirror import Mirror
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        print("starting", flush=True)
        with mounted_process(partial(Mirror, folder / "below"), folder / "mount"):
            time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 2.5])
def test_ctrl_c_at_any_moment_is_quiet_and_leaves_no_mount(tmp_path: Path, delay_s: float) -> None:
    for name in ("below", "mount"):
        (tmp_path / name).mkdir()
    script = tmp_path / "script.py"
    script.write_text(CODE)
    child = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "starting\n"
    time.sleep(delay_s)
    os.killpg(child.pid, signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert (child.returncode, error) == (130, "")
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def test_a_signal_that_another_thread_takes_is_held_back_too() -> None:
    """The system gives a signal to any thread; Python runs its handler in the main one."""
    over, reached = threading.Event(), []

    def interrupted() -> None:
        with _signals_held():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            reached.append("the end")

    threading.Thread(target=over.wait, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        over.set()
    assert reached == ["the end"]
