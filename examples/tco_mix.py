"""A cache of disk in front of tape, and what each cash flow was for."""

from __future__ import annotations

from dataclasses import replace

from tierwise.tco.compare import compare
from tierwise.tco.ledger import Cause
from tierwise.tco.scenario import DataSpec, Scenario, Strategy, Tier

mix = Strategy(
    name="disk in front of tape",
    tiers=(Tier(medium="hdd", share=0.05), Tier(medium="tape")),
)
scenario = Scenario(media=("tape",), strategies=(mix,), data=DataSpec(size="2 PB", copies=2.0))
result = compare(replace(scenario, horizon_years=30), samples=0)
for item in result.ranking:
    moving = item.ledger.total(lambda row: row.cause is Cause.MIGRATION)
    print(
        f"{item.name:22} {item.endowment_usd:12,.0f} USD today, {moving:10,.0f} of it to move data"
    )
    for cause, amount in item.ledger.by_cause().items():
        print(f"  {cause:12} {amount:12,.0f}")
