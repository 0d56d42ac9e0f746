"""How hard a sample is: ask, read the answers off the log, sort.

```
 probes + masks -> attempts -> passrate, pism (fit), balance (cmab),  -> scores  -> select
 what to ask       SQLite log  rscore (trees), with their noise          parquet    arms
        `--- scoring: asks what is missing, whole grid or `adaptive` --'    |
                                                  agreement, cost, evidence, figures: the report
```
"""
