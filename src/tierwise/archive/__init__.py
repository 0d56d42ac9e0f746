"""Which medium: a POSIX file system whose bytes end on write-once discs, and outlive any of them.

```
 kernel -- fuse -- operations -- fs -- contents     the mount: names and open files
                                 |        |
 library callers -- files -------'      store       the buffer: one file per content
                                 |
                     namespace, catalogue (SQLite)  every question except the bytes
                                 journal            names beside the bytes, should it be lost
                                 |
   bucket -> plans -> seal -> image, slices         full bucket -> disc image
                       burn -> parity, shelf        images -> arrays -> discs, read back
                                  |
   evict, room   recall, requests   library         the buffer freed, limited, filled again
                                  |
                               changer, drive       a real library, for the simulated one
   scrub, mend, checks                              fixity, repair
   gather, rebuild                                  the catalogue from discs alone
   founding, recovery                               begun, and taken up again after a crash
   questions, inventory, figures, export            what people and the cost model ask
```

`vault.Archive` is all of it as one object. Import it from there: this package's top imports
nothing, so that a question to one module does not load the others.
"""
