"""What keeping data costs over decades, and how sure one can be.

```
facts      CSV rows with sources -> FactSet          facts/*.csv, facts/media.toml
scenario   TOML -> Scenario                          presets/*.toml
inputs     scenario + facts -> named numbers, one column a sample
vintages   what a unit bought in a year holds, costs and lives
cohorts    need per year -> whole units, vintages, retirements, spares
cloud      need per year -> storage, requests, egress
migration  data moved -> hours, labour, energy, and whether the drives suffice
model      a strategy -> cash flows by (medium, year, category, cause), vectorised over samples
ledger     cash flows -> tables, shares, CAPEX and OPEX under three definitions
value      discounting, endowment, pay as you go, cost per TB-year
spread     draws -> bands, probability of being cheapest, tornado, Sobol indices
compare    strategies side by side: the front door
solve      break-even, sweep, winner map, waterfall
carbon     energy and embodied emissions
figures    curves, bands, maps as SVG with their CSV
report     all of it as one report
answers    all of it as tables, JSON and CSV for the command line
page       all of it as a page on this machine
precursor  the 2017 model restated, each defect a switch
dshr       Rosenthal's endowment model
explain    the precursor, one defect fewer at a time
```

Money is constant US dollars of the scenario's currency year, capacity decimal terabytes, years
run from 0 with cash flows at their start unless the scenario says otherwise.

Source: after W. Yan et al., "LT-TCO: A TCO Calculation Model of Data Centers for Long-Term Data
Preservation", IEEE NAS 2019 (its abstract; the full text was not available).
"""
