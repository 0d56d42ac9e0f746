"""The cost model again, for one sample at a time, in plain Python without numpy.

Written from docs/tco.md rather than from the vectorised code, as the oracle of
`test_oracle.py` and the baseline of `bench/tco.py`. Only single-medium strategies with rented
space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Row = dict[tuple[str, str], float]


def whole(x: float) -> int:
    return max(1, min(math.floor(x + 0.5), 1_000_000))


class Population:
    """Cohorts of whole units covering a need."""

    def __init__(self) -> None:
        self.cohorts: list[tuple[int, int, float, float]] = []  # leaves, units, amount, weight
        self.failures = 0.0
        self.before = 0.0

    def step(
        self, year: int, need: float, per_unit: float, *, life: int, weight: float, afr: float
    ) -> dict[str, float]:
        there = sum(c[2] for c in self.cohorts)
        gone = [c for c in self.cohorts if c[0] == year]
        self.cohorts = [c for c in self.cohorts if c[0] != year]
        amount = sum(c[2] for c in self.cohorts)
        gap = need - amount if need - amount > 1e-9 * need else 0.0
        bought = math.ceil(gap / per_unit * (1.0 - 1e-9))
        growth = min(gap, max(need - self.before, 0.0))
        if bought > 0:
            self.cohorts.append((year + life, bought, bought * per_unit, bought * weight))
        units = sum(c[1] for c in self.cohorts)
        self.failures += afr * units
        spares = math.floor(self.failures + 1e-9)
        self.failures -= spares
        self.before = need
        return {
            "bought": bought,
            "growth_share": growth / gap if gap > 0 else 0.0,
            "retired": sum(c[1] for c in gone),
            "retired_share": sum(c[2] for c in gone) / there if there > 0 else 0.0,
            "installed": units,
            "weight": sum(c[3] for c in self.cohorts),
            "retired_weight": sum(c[3] for c in gone),
            "spares": spares,
        }


def add(row: Row, category: str, cause: str, amount: float) -> None:
    row[category, cause] = row.get((category, cause), 0.0) + amount


def present_value(
    medium: str,
    kind: str,
    p: Mapping[str, float],
    *,
    horizon: int,
    drill_every: int = 1,
    leave: bool = False,
) -> float:
    """Return the present value of keeping everything on one medium, start-of-year, real."""
    rows = (cloud_rows if kind == "cloud" else unit_rows)(
        medium, p, horizon=horizon, drill_every=drill_every, leave=leave
    )
    return sum(
        sum(row.values()) / (1.0 + p["finance.discount"]) ** year for year, row in enumerate(rows)
    )


def cloud_rows(
    m: str, p: Mapping[str, float], *, horizon: int, drill_every: int, leave: bool
) -> list[Row]:
    rows: list[Row] = []
    before = 0.0
    objects = p["data.objects"] or p["data.size"] * 1000.0 / p[f"{m}.object_size"]
    per_tb = objects / p["data.size"] if p["data.size"] else 0.0

    def out(tb: float, trend: float) -> tuple[float, float]:
        month, cost, lower = tb / 12.0, 0.0, 0.0
        for upper, band in ((10.0, "10tb"), (50.0, "50tb"), (150.0, "150tb"), (1e300, "beyond")):
            part = min(max(month - lower, 0.0), upper - lower)
            cost += part * p[f"{m}.egress_{band}"] * 1000.0
            lower = upper
        egress = 12.0 * cost * p[f"{m}.egress_factor"] * trend
        return tb * 1000.0 * p[f"{m}.retrieval"] * trend, egress

    for year in range(horizon):
        row: Row = {}
        trend = (1.0 - p[f"{m}.decline"]) ** year
        tb = p["data.size"] * (1.0 + p["data.growth"]) ** year
        kb = p[f"{m}.overhead_cold"] * p[f"{m}.storage"]
        kb += p[f"{m}.overhead_standard"] * p[f"{m}.standard_rate"]
        month = 1000.0 * p[f"{m}.storage"] + per_tb * kb * 1e-6
        add(row, "storage", "run", tb * 12.0 * month * trend)
        new = max(tb - before, 0.0)
        add(row, "requests", "in", new * per_tb * p[f"{m}.put"] / 1000.0 * trend)
        drill = p["access.drill_share"] if year % drill_every == drill_every - 1 else 0.0
        for amount in out(tb * (p["access.read_share"] + drill), trend):
            add(row, "out", "access", amount)
        if leave and year == horizon - 1:
            for amount in out(tb, trend):
                add(row, "out", "exit", amount)
        wage = p["staff.wage"] * (1.0 + p["staff.wage_rate"]) ** year
        add(row, "staff", "run", tb / 1000.0 * p[f"{m}.staff"] * wage)
        before = tb
        rows.append(row)
    return rows


def unit_rows(
    m: str, p: Mapping[str, float], *, horizon: int, drill_every: int, leave: bool
) -> list[Row]:
    f = {key.partition(".")[2]: value for key, value in p.items() if key.startswith(f"{m}.")}
    media, slots, readers = Population(), Population(), Population()
    rows: list[Row] = []
    stored_before = logical_before = 0.0
    redundancy = p["data.copies"] * (1.0 + p["data.parity"])
    hours_year = 8760.0 * p["migration.utilisation"]
    hire = f["reader_price"] / (f["reader_life"] * hours_year)
    for year in range(horizon):
        row: Row = {}
        logical = p["data.size"] * (1.0 + p["data.growth"]) ** year
        stored = logical * redundancy
        wage = p["staff.wage"] * (1.0 + p["staff.wage_rate"]) ** year
        hour = wage / p["staff.hours"]
        tariff = p["power.tariff"] * (1.0 + p["power.tariff_rate"]) ** year
        watts = f["power"] * (1.0 + f["power_rate"]) ** year
        capacity = min(
            f["capacity"] * (1.0 + f["capacity_rate"]) ** year, max(f["ceiling"], f["capacity"])
        )
        price = unit_price(f, year)
        life = unit_life(f, year)
        did = media.step(year, stored / f["fill"], capacity, life=life, weight=watts, afr=f["afr"])
        add(row, "media", "buy", (did["bought"] + did["spares"]) * price)
        moved = min(stored_before, stored) * did["retired_share"]
        came = max(logical - logical_before, 0.0) * redundancy
        grown = did["bought"] * did["growth_share"] if year else 0.0
        old_and_new = did["retired"] + (did["bought"] - grown if year else 0.0)
        drill = p["access.drill_share"] if year % drill_every == drill_every - 1 else 0.0
        read = logical * (p["access.read_share"] + drill)
        moves = [(0.0, came, did["bought"] if year == 0 else grown, 0.0)]
        moves += [(moved, moved, old_and_new, moved), (read, 0.0, 0.0, 0.0)]
        if leave and year == horizon - 1:
            moves.append((logical, 0.0, 0.0, 0.0))
        for off, on, handled, priced in moves:
            hours = (off + 2.0 * on) * 1e6 / f["rate"] / 3600.0
            add(row, "handling", "move", handled * f["handling"] / 60.0 * hour)
            add(row, "drives", "move", hours * hire)
            kwh = hours * f["reader_power"] / 1000.0 * p["power.pue"]
            add(row, "energy", "move", kwh * tariff)
            add(row, "project", "move", priced * p["migration.price"])
        slot = slots.step(
            year,
            did["installed"],
            1.0,
            life=whole(f["slot_life"]),
            weight=f["slot_price"],
            afr=0.0,
        )
        add(row, "slots", "buy", slot["bought"] * f["slot_price"])
        wanted = 0.0
        if f["units_per_reader"] > 0:
            wanted = max(
                math.ceil(did["installed"] / f["units_per_reader"] - 1e-9),
                math.ceil(read * 1e6 / f["rate"] / 3600.0 / hours_year - 1e-9),
            )
        reader = readers.step(
            year,
            wanted,
            1.0,
            life=whole(f["reader_life"]),
            weight=f["reader_price"],
            afr=0.0,
        )
        add(row, "readers", "buy", reader["bought"] * f["reader_price"])
        overlap = p["migration.overlap"]
        there = did["installed"] + overlap * did["retired"]
        parts = p["site.rack_parts"]
        racks = math.ceil(there / f["units_per_rack"] * parts - 1e-9) / parts
        add(row, "rent", "run", racks * (p["site.rack_rent"] + p["site.network"]))
        draw = did["weight"] + overlap * did["retired_weight"]
        draw += reader["installed"] * f["reader_power"]
        add(row, "energy", "run", draw * 8.76 * p["power.pue"] * tariff)
        add(row, "staff", "run", stored / 1000.0 * f["staff"] * wage)
        add(row, "service", "run", (slot["weight"] + reader["weight"]) * f["service"])
        stored_before, logical_before = stored, logical
        rows.append(row)
    return rows


def unit_price(f: Mapping[str, float], year: int) -> float:
    rate = (1.0 - f["decline"]) * (1.0 + f["capacity_rate"]) - 1.0
    price = f["price"] * f["capacity"]
    if f["capacity_rate"] <= 1e-9:
        return float(price * (1.0 + rate) ** year)
    ratio = max(f["ceiling"] / f["capacity"], 1.0)
    until = math.log(ratio) / math.log1p(f["capacity_rate"])
    past = min(rate, max(-f["decline"], 0.0))
    grown: float = price * (1.0 + rate) ** min(year, until)
    return float(grown * (1.0 + past) ** max(year - until, 0.0))


def unit_life(f: Mapping[str, float], year: int) -> int:
    life = math.floor(f["life"] + 0.5)
    if f["generation_gap"] > 0:
        gap = f["generation_gap"]
        generation = math.floor((year + f["elapsed"]) / gap + 1e-9)
        sold = (generation + 1 + math.floor(f["read_back"] + 0.5)) * gap - f["elapsed"]
        life = min(life, math.floor(sold - year + f["reader_life"] + 1e-9))
    return whole(life)
