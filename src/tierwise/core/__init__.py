"""What all four capabilities stand on: thin, and free of tensors, arrays and data frames.

```
errors    one tree, one exit code a leaf
units     sizes, durations, money: typed by people, read by people
config    TOML -> frozen dataclasses
facts     CSV -> sourced numbers
records   what a run leaves behind; whole-file writes
progress  bar, JSON lines or silence
report    data -> one HTML file, Markdown, SVG + CSV
extras    module -> pip extra
```
"""
