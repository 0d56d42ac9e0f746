"""Small scenarios and the plain oracle, shared by the tests of the cost model."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest

from tierwise.tco.compare import StrategyCost, cost_of
from tierwise.tco.inputs import facts_of, resolve_inputs
from tierwise.tco.scenario import DataSpec, FinanceSpec, Scenario, check_scenario


class Make(Protocol):
    """Builds a one-medium scenario; see `make`."""

    def __call__(
        self,
        medium: str = "tape",
        *,
        size: str = "10 PB",
        years: int = 50,
        data: dict[str, Any] | None = None,
        finance: dict[str, Any] | None = None,
        facts: dict[str, float] | None = None,
        **changes: Any,
    ) -> Scenario: ...


def make_scenario(
    medium: str = "tape",
    *,
    size: str = "10 PB",
    years: int = 50,
    data: dict[str, Any] | None = None,
    finance: dict[str, Any] | None = None,
    facts: dict[str, float] | None = None,
    **changes: Any,
) -> Scenario:
    """A scenario on one medium, undiscounted, with facts overridden by key."""
    overrides: dict[str, dict[str, float]] = {}
    for key, value in (facts or {}).items():
        group, _, name = key.partition(".")
        overrides.setdefault(group, {})[name] = value
    scenario = Scenario(
        name="test",
        horizon_years=years,
        media=(medium,),
        data=DataSpec(size=size, **(data or {})),
        finance=FinanceSpec(**{"discount_rate": 0.0, **(finance or {})}),
        overrides=overrides,
    )
    return check_scenario(replace(scenario, **changes))


def cost(scenario: Scenario, name: str | None = None) -> StrategyCost:
    """The cost of a scenario's only (or named) strategy."""
    facts = facts_of(scenario)
    point = resolve_inputs(scenario, facts).point()
    plan = next(s for s in scenario.plans if name in (None, s.name))
    return cost_of(scenario, plan, point, facts)


@pytest.fixture
def make() -> Make:
    return make_scenario


class Cost(Protocol):
    """Costs a scenario; see `cost`."""

    def __call__(self, scenario: Scenario, name: str | None = None) -> StrategyCost: ...


@pytest.fixture(name="cost")
def cost_fixture() -> Cost:
    return cost


@pytest.fixture(scope="session")
def plain_model() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "plain_model", Path(__file__).with_name("plain_model.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
