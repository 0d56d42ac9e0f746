"""`tierwise tco serve`: the cost model as a page on this machine, for the person who decides.

```
state   address query <-> scenario, one field at a time, errors beside their field
app     routes: the page, its answers, its exports (Starlette, loopback only)
page.html, page.css, page.js   what the browser gets; nothing from any other host
```

The whole state is in the address, so it can be mailed. Left out: users, storage, anything that
writes: the page only reads facts and computes.
"""
