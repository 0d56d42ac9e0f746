"""Whether a choice of samples helps: arms x seeds, and what the numbers bear.

```
 price (before) ... study -> cells, each a recipe -> study_analysis -> study_report
                      `-- tuning: the rate of each arm
```
"""
