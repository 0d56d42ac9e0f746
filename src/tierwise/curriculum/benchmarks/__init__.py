"""The six benchmarks of the difficulty-sampling paper, read from local files and scored.

```
 files (JSON, Parquet, TSV) -> items -> answers of a model -> marks -> measures
 catalogue: which benchmark     |       the attempt log        |       with intervals
 rows, pictures                 one module a benchmark:        by rule, or by a judge
                                question, metric, groups
```

Nothing is downloaded and no data is shipped; docs/benchmarks.md says which files to put where and
what differs from the published harnesses. Left out: other benchmarks, few-shot prompts, captions
and OCR texts in place of pictures.
"""
