"""At what price of moving a terabyte does optical beat tape, and how sure is the winner?"""

from __future__ import annotations

from tierwise.tco.compare import compare
from tierwise.tco.scenario import load_preset
from tierwise.tco.solve import break_even

scenario = load_preset("modern-2026")
found = break_even(scenario, "migration.price", "tape", "optical", low=1, high=600)
print(f"{found.cheaper_at_low} up to {found.crossings[0]:.1f} USD/TB, then {found.cheaper_at_high}")

result = compare(scenario, samples=500, seed=1)
assert result.spread is not None
for item in result.ranking:
    low, middle, high = (value / 1e6 for value in result.spread.percentiles(item.name))
    share = result.spread.p_cheapest[item.name]
    print(f"{item.name:8} {low:6.1f} {middle:6.1f} {high:6.1f} M USD, cheapest in {share:.1%}")
