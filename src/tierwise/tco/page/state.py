"""Address query -> scenario, one field at a time, so that an error stands beside its field.

A field is either one of the scenario's headline numbers, under a short name, or any input by
key (`tape.price`). What is not in the query keeps the base scenario's value. Paths cannot be
given here: a page must not make the server read files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tierwise.core.errors import ConfigError, TierwiseError
from tierwise.core.units import format_size
from tierwise.tco.facts import FactSet, MediumKind, facts_titles
from tierwise.tco.inputs import Inputs, media_in, resolve_inputs
from tierwise.tco.scenario import Scenario, check_scenario, logical_tb

MAX_PAGE_YEARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One control of the page.

    Attributes:
        name: Key in the address.
        label: What it is, in words.
        kind: How it is shown.
        value: The base scenario's value, as typed.
        low: Start of the slider.
        high: End of the slider.
        step: Step of the slider.
        unit: Unit after the label.
        group: Heading it stands under.
        source: Where the value comes from.
        note: More about it.
        choices: (value, label) pairs of a choice.
    """

    name: str
    label: str
    kind: Literal["number", "size", "choice", "media", "check"]
    value: str
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    unit: str = ""
    group: str = ""
    source: str = "the scenario"
    note: str = ""
    choices: tuple[tuple[str, str], ...] = ()


_HEADLINE = (
    # key, label, low, high, step
    ("migration.price", "moving a TB: planning, checking", 0.0, 100.0, 0.5),
    ("staff.wage", "a person's year", 30000.0, 250000.0, 1000.0),
    ("power.tariff", "electricity", 0.02, 0.5, 0.01),
    ("power.pue", "PUE", 1.0, 2.5, 0.01),
    ("site.rack_rent", "a rack for a year", 0.0, 30000.0, 250.0),
)
_BY_MEDIUM = (
    ("price", "media price"),
    ("decline", "price decline a year"),
    ("life", "media life"),
    ("capacity_rate", "capacity growth a year"),
    ("staff", "people per PB"),
)


def fields_of(base: Scenario, facts: FactSet) -> list[Field]:
    """Return the page's controls for a base scenario, in order."""
    inputs = resolve_inputs(base, facts)
    return [*_scenario_fields(base, facts), *_input_fields(base, inputs)]


def _scenario_fields(base: Scenario, facts: FactSet) -> list[Field]:
    size_tb, _ = logical_tb(base.data)
    discount = resolve_inputs(base, facts).ranges["finance.discount"]
    costable = tuple(
        (name, title) for name, title, kind in facts_titles(facts) if kind != MediumKind.ANNOUNCED
    )
    return [
        Field(name="size", label="data", kind="size", value=format_size(size_tb * 1e12),
              group="What is kept", note="decimal (1 PB) or binary (1 PiB)"),
        Field(name="years", label="kept for", kind="number", value=f"{base.horizon_years}", low=1,
              high=MAX_PAGE_YEARS, step=1, unit="years", group="What is kept"),
        Field(name="growth", label="growth a year", kind="number", value=f"{base.data.growth:g}",
              low=-0.2, high=0.3, step=0.01, unit="fraction", group="What is kept"),
        Field(name="copies", label="copies", kind="number", value=f"{base.data.copies:g}", low=1,
              high=5, step=1, group="What is kept", note="a cloud keeps its own copies"),
        Field(name="read", label="read a year", kind="number",
              value=f"{base.access.read_share:g}", low=0, high=1, step=0.01, unit="share",
              group="What is kept"),
        Field(name="exit", label="read everything out at the end", kind="check",
              value="1" if base.access.exit else "", group="What is kept"),
        Field(name="discount", label="discount rate, real", kind="number",
              value=f"{discount.value:g}", low=0, high=0.1, step=0.005, unit="1/year",
              group="Money", source=discount.fact.source if discount.fact else "the scenario"),
        Field(name="opex", label="OPEX is", kind="choice", value=base.opex, group="Money",
              choices=(("A", "A: running + migration"), ("B", "B: A + replacement"),
                       ("C", "C: energy + migration + replacement"))),
        Field(name="media", label="media", kind="media", value=",".join(base.media),
              group="Compared", choices=costable),
    ]  # fmt: skip


def _input_fields(base: Scenario, inputs: Inputs) -> list[Field]:
    fields = [
        _input_field(inputs, key, label, "People, power, space", (low, high, step))
        for key, label, low, high, step in _HEADLINE
    ]
    for medium in media_in(base):
        for name, label in _BY_MEDIUM:
            key = f"{medium}.{name}"
            if key in inputs.ranges:
                fields.append(_input_field(inputs, key, label, medium, _slider(inputs, key)))
    return fields


def _slider(inputs: Inputs, key: str) -> tuple[float, float, float]:
    """Return (low, high, step) that reach well past the sourced range."""
    item = inputs.ranges[key]
    name = key.rpartition(".")[2]
    if name in ("decline", "capacity_rate"):
        return -0.2, 0.5, 0.01
    if name == "life":
        return 1.0, 100.0, 1.0
    high = max(2.0 * item.high, 2.0 * item.value, 1e-6)
    step = 10.0 ** math.floor(math.log10(high / 100.0))
    return 0.0, math.ceil(high / step) * step, step


def _input_field(
    inputs: Inputs, key: str, label: str, group: str, slider: tuple[float, float, float]
) -> Field:
    item = inputs.ranges[key]
    low, high, step = slider
    fact = item.fact
    return Field(
        name=key,
        label=label,
        kind="number",
        value=f"{item.value:g}",
        low=low,
        high=high,
        step=step,
        unit=fact.unit if fact else "",
        group=group,
        source=fact.source if fact else "the scenario",
        note=f"{fact.kind}, read {fact.retrieved}, range {item.low:g} to {item.high:g}. {fact.note}"
        if fact
        else "",
    )


class StateError(Exception):
    """Raised when a query makes no scenario; `errors` has one sentence a field."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        super().__init__("; ".join(errors.values()))
        self.errors = dict(errors)


def scenario_of(base: Scenario, query: Mapping[str, str], facts: FactSet) -> Scenario:
    """Return the base scenario changed by a query; inputs of media not compared are ignored.

    Raises:
        StateError: Some fields cannot be used; each is named with its reason.
    """
    scenario, errors = base, {}
    for name, text in sorted(query.items(), key=lambda item: (item[0] != "media", "." in item[0])):
        medium = name.partition(".")[0]
        if medium in facts.media and medium not in media_in(scenario):
            continue
        try:
            changed = _apply(scenario, name, text.strip())
            resolve_inputs(check_scenario(changed), facts)
            scenario = changed
        except TierwiseError as error:
            hint = f" ({error.hint})" if error.hint else ""
            errors[name] = f"{error.message}{hint}"
    if errors:
        raise StateError(errors)
    return scenario


def _apply(scenario: Scenario, name: str, text: str) -> Scenario:
    data, access = scenario.data, scenario.access
    match name:
        case "size":
            return replace(scenario, data=replace(data, size=text, inventory="", num_objects=0.0))
        case "years":
            years = _number(text)
            if not (years == int(years) and 1 <= years <= MAX_PAGE_YEARS):
                raise ConfigError(f"{text} is not a whole number of years from 1 to 100")
            return replace(scenario, horizon_years=int(years))
        case "growth":
            return replace(scenario, data=replace(data, growth=_number(text)))
        case "copies":
            return replace(scenario, data=replace(data, copies=_number(text)))
        case "read":
            return replace(scenario, access=replace(access, read_share=_number(text)))
        case "exit":
            return replace(scenario, access=replace(access, exit=text in ("1", "true", "on")))
        case "discount":
            finance = replace(scenario.finance, discount_rate=_number(text))
            return replace(scenario, finance=finance)
        case "opex":
            if text not in ("A", "B", "C"):
                raise ConfigError(f"{text!r} is not A, B or C")
            return replace(scenario, opex="A" if text == "A" else "B" if text == "B" else "C")
        case "media":
            chosen = tuple(item.strip() for item in text.split(",") if item.strip())
            return replace(scenario, media=chosen)
    group, dot, key = name.partition(".")
    if not dot:
        raise ConfigError(f"no field {name}")
    overrides = {**scenario.overrides, group: {**scenario.overrides.get(group, {})}}
    overrides[group][key] = _number(text)
    return replace(scenario, overrides=overrides)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a number") from error
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is not a finite number")
    return value
