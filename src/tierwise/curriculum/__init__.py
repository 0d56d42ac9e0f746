"""Which sample, when: how hard is this sample for this model, and which arm does it join.

```
 samples -> models -> difficulty ------------> training ---------------> experiment
 files or   a VLM,    attempts, measures,      SFT, GRPO, checkpoints,   arms x seeds,
 folders    servers   strata, arms             evaluation                what they bear
```

Beside these: `answers`, `verdicts`, `mathcheck` (what an answer says, and whether it is right),
`audit` (of rewards), `benchmarks` (published data and metrics) and `tiny` (the model that ships).

Two of the three difficulty measures are those of Qi et al., "Revisiting the Data Sampling in
Multimodal Post-training from a Difficulty-Distinguish View", AAAI 2026,
https://arxiv.org/abs/2511.06722; docs/papers.md has the third, and lists where this package departs
from them. Nothing heavy is imported here.
"""
