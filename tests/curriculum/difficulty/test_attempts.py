from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierwise.core.errors import AccessError, DataError
from tierwise.curriculum.difficulty.attempts import Attempt, AttemptKey, AttemptLog, Balance
from tierwise.curriculum.verdicts import Verdict


def key(number: int, sample_id: str = "a") -> AttemptKey:
    return AttemptKey(
        sample_id=sample_id,
        probe="masked",
        mask_permille=300,
        k=number,
        seed=7,
        model_hash="m",
        prompt_hash="p",
    )


def attempt(number: int, text: str = "4", sample_id: str = "a") -> Attempt:
    return Attempt(
        key=key(number, sample_id),
        text=text,
        extracted=text,
        verdict=Verdict.RIGHT,
        score=1.0,
        num_tokens=2,
        finished=False,
        seconds=0.25,
    )


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    with AttemptLog(tmp_path / "log.sqlite") as log:
        log.add([attempt(2), attempt(1)])
        assert list(log.attempts(model_hash="m", seed=7)) == [attempt(1), attempt(2)]
        assert list(log.attempts(model_hash="m", seed=8)) == []
        assert log.missing([key(1), key(3), key(2)]) == [key(3)]
        assert log.totals() == {"attempts": 2, "errors": 0, "tokens": 4, "seconds": 0.5}


def test_the_first_answer_to_a_key_counts(tmp_path: Path) -> None:
    with AttemptLog(tmp_path / "log.sqlite") as log:
        log.add([attempt(1, "first")])
        log.add([attempt(1, "second"), attempt(2, "new")])
        assert [row.text for row in log.attempts()] == ["first", "new"]


def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with AttemptLog(tmp_path / "log.sqlite") as log:
        broken: Any = replace(attempt(2), text=None)  # type: ignore[arg-type]
        log.add([attempt(5)])
        log.claim("batch", owner="me", now=0.0, lease_s=10.0)
        with pytest.raises(sqlite3.IntegrityError):
            log.add([attempt(1), broken], batch="batch")  # NOT NULL: the row is refused
        assert [row.key.k for row in log.attempts()] == [5]
        assert log.owners() == ["me"]


def test_balances_are_kept_beside_the_greedy_answer(tmp_path: Path) -> None:
    row = Balance(
        sample_id="a", variant="sum", model_hash="m", prompt_hash="p", ratio=0.5, num_tokens=2
    )
    with AttemptLog(tmp_path / "log.sqlite") as log:
        assert log.missing_balances([key(0)]) == [key(0)]
        log.add([attempt(0)], [row])
        assert log.missing_balances([key(0)]) == []
        assert list(log.balances(model_hash="m")) == [row]


def test_a_claim_holds_until_its_lease_is_over(tmp_path: Path) -> None:
    with AttemptLog(tmp_path / "x.sqlite") as log, AttemptLog(tmp_path / "x.sqlite") as other:
        assert log.claim("b", owner="one", now=100.0, lease_s=10.0)
        assert log.claim("b", owner="one", now=101.0, lease_s=10.0)
        assert not other.claim("b", owner="two", now=105.0, lease_s=10.0)
        assert other.claim("b", owner="two", now=111.5, lease_s=10.0)
        assert not log.claim("b", owner="one", now=112.0, lease_s=10.0)
        other.add([attempt(1)], batch="b")
        assert log.claim("b", owner="one", now=112.0, lease_s=10.0)
        log.release(owner="one")
        assert other.claim("b", owner="two", now=112.0, lease_s=10.0)


def test_what_a_server_never_answered_can_be_asked_again(tmp_path: Path) -> None:
    def failed(number: int, name: str) -> Attempt:
        return Attempt(
            key=key(number), text="", extracted="", verdict=Verdict.ERROR, score=0.0, error=name
        )

    keys = [key(number) for number in range(5)]
    with AttemptLog(tmp_path / "x.sqlite") as log:
        log.add([failed(0, "server_500"), failed(1, "image_empty"), attempt(2)])
        log.add([failed(3, "server_timeout")])
        unreached = log.unreached(model_hash=keys[0].model_hash)
        assert unreached == {keys[0], keys[3]}
        assert log.unreached(model_hash="another") == set()
        assert log.missing(keys) == [keys[4]]
        assert log.missing(keys, again=unreached) == [keys[0], keys[3], keys[4]]
        log.add([attempt(0), attempt(1), failed(2, "server_500"), failed(3, "server_500")])
        rows = {row.key.k: (row.verdict.value, row.error) for row in log.attempts()}
        assert rows[0] == (attempt(0).verdict.value, "")
        assert rows[1] == ("error", "image_empty")  # the first outcome counts, but for servers'
        assert rows[2] == (attempt(2).verdict.value, "")
        assert rows[3] == ("error", "server_500")
        assert log.missing(keys, again=unreached) == [keys[3], keys[4]]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database" * 100)
    with pytest.raises(DataError, match="not an attempt log"):
        AttemptLog(tmp_path / "text")
    with sqlite3.connect(tmp_path / "later.sqlite") as later:
        later.execute("PRAGMA user_version = 99")
    later.close()
    with pytest.raises(DataError, match="version 99"):
        AttemptLog(tmp_path / "later.sqlite")


def _write_forever(path: Path, name: str) -> None:
    with AttemptLog(path) as log:
        for number in range(0, 10**9, 5):
            log.add([attempt(number + place, sample_id=name) for place in range(5)])


def _write_some(path: Path, numbers: Sequence[int]) -> None:
    with AttemptLog(path) as log:
        for number in numbers:
            log.add([attempt(number, sample_id=f"s{number}")])


def test_kill_minus_nine_loses_no_whole_batch_and_leaves_no_part_of_one(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    context = multiprocessing.get_context("spawn")
    for round_number in range(3):
        writer = context.Process(target=_write_forever, args=(path, f"r{round_number}"))
        writer.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if path.exists():
                with AttemptLog(path) as log:
                    found = [
                        one for one in log.attempts() if one.key.sample_id == f"r{round_number}"
                    ]
                if len(found) > 20:
                    break
            time.sleep(0.05)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        with AttemptLog(path) as log:
            rows = [one for one in log.attempts() if one.key.sample_id == f"r{round_number}"]
        assert len(rows) > 20
        assert len(rows) % 5 == 0
        assert [row.key.k for row in rows] == list(range(len(rows)))


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    context = multiprocessing.get_context("spawn")
    shares = [range(start, 120, 2) for start in (0, 1, 0)]  # two of them write the same rows
    writers = [context.Process(target=_write_some, args=(path, list(share))) for share in shares]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    with AttemptLog(path) as log:
        assert sorted(row.key.k for row in log.attempts()) == list(range(120))


@pytest.mark.parametrize("code", [sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY])
def test_a_log_that_may_not_be_written_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As on a read-only file system; whoever runs these tests may be allowed everything."""

    def refuse(self: AttemptLog) -> None:
        error = sqlite3.OperationalError("attempt to write a readonly database")
        error.sqlite_errorcode = code
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(AttemptLog, "_migrate", refuse)
        with pytest.raises(AccessError, match=r"x\.sqlite cannot be opened for writing"):
            AttemptLog(tmp_path / "x.sqlite")
