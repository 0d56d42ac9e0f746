"""tierwise: which data goes where, and when?

```
 which sample,      which device,      which medium,      which generation,
 curriculum ------> offload ---------> archive ---------> tco
 seconds - hours    us - ms            seconds - weeks    years
```

The four capabilities know nothing of each other: they meet in files (docs/formats/) and in
`tierwise.cli`. Each is a pip extra of its own; importing this package imports none of them.
"""

__version__ = "0.1.0"
