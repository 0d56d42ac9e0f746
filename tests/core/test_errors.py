"""Every leaf has its own exit code, its standard class, and survives pickling."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from tierwise.core import errors
from tierwise.core.errors import TierwiseError

LEAVES = {
    kind: kind.exit_code
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TierwiseError)
}


def test_exit_codes_are_distinct_and_leave_room_for_internal_and_interrupted() -> None:
    codes = list(LEAVES.values())
    assert len(set(codes)) == len(codes) == 11
    assert not {errors.EXIT_INTERNAL, errors.EXIT_INTERRUPTED, 0} & set(codes)


@pytest.mark.parametrize("kind", [k for k in LEAVES if k is not TierwiseError])
def test_each_leaf_refines_a_standard_class(kind: type[TierwiseError]) -> None:
    standard = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert standard[0] is not Exception


@pytest.mark.parametrize("kind", list(LEAVES))
def test_message_and_hint_survive_pickling(kind: type[TierwiseError]) -> None:
    again = pickle.loads(pickle.dumps(kind("what is wrong", hint="what to do")))
    assert (type(again), str(again), again.hint) == (kind, "what is wrong", "what to do")


@pytest.mark.parametrize(("kind", "code"), list(LEAVES.items()))
def test_the_documentation_lists_every_code(kind: type[TierwiseError], code: int) -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    assert re.search(rf"^\| {code} \| `{kind.__name__}` ", page, re.MULTILINE)
