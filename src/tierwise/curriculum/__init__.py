"""Which sample, when: how hard is this sample for this model, and which arm does it join.

```
 samples -> models -> attempts -> answers + verdicts -> passrate, pism, -> scores  -> select
 files or   a VLM,    SQLite log  extracted, judged     cmab, rscore       parquet    arms
 folders    servers                                     with their noise   + report   JSONL
```

Two of the three difficulty measures are those of Qi et al., "Revisiting the Data Sampling in
Multimodal Post-training from a Difficulty-Distinguish View", AAAI 2026,
https://arxiv.org/abs/2511.06722; docs/papers.md has the third, and lists where this package departs
from them. Nothing heavy is imported here.
"""
