"""The table of extras mirrors pyproject.toml, and a missing one is a sentence with the pip line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tierwise.core.errors import MissingExtraError
from tierwise.core.extras import EXTRA_MODULES, require_extra

DISTRIBUTION_OF = {"PIL": "pillow", "sklearn": "scikit-learn", "math_verify": "math-verify"}


@pytest.mark.parametrize("extra", list(EXTRA_MODULES))
def test_the_table_mirrors_the_project_file(extra: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    wanted = project["project"]["optional-dependencies"][extra]
    names = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in wanted}
    assert {DISTRIBUTION_OF.get(module, module) for module in EXTRA_MODULES[extra]} == names


@pytest.mark.parametrize("extra", list(EXTRA_MODULES))
def test_an_installed_extra_is_found(extra: str) -> None:
    require_extra(extra)


@pytest.mark.parametrize("extra", list(EXTRA_MODULES))
def test_a_missing_module_is_named(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        require_extra(extra)
    assert EXTRA_MODULES[extra][0] in str(caught.value)
    assert caught.value.hint == f"pip install 'tierwise[{extra}]'"
    assert caught.value.exit_code == 3
