"""offload: the CPU updates parameters while the GPU goes on, and not a bit changes.

```
 model -> blocks    units in forward order                                  blocks.py
       -> memory    committed and shadow state of every parameter           memory.py
       -> shadow    gradient ready: proposal, while backward goes on        shadow.py
       -> queue     lowest block first, worker threads                      queue.py
       -> kernel    one AdamW pass, torch's bits                            kernel.py
       -> optimizer step(): keep, or update with the true coefficient       optimizer.py
          clip      the global norm, and what it makes of gradients        clip.py
       -> delivery  new weights to the device, block by block               delivery.py
          lane      CPU or CUDA, behind one interface                       lane.py, lane_cuda.py
          resident  blocks that stay on the device                          resident.py
 profile -> plan    which blocks stay, how long a step takes, bound, gap    plan.py
         -> simulate  the three lanes in virtual time                       simulate.py
 trace, verify      what ran where and when; the proof of equal bits        trace.py, verify.py
```

Names are imported when first used: planning needs neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierwise.offload.optimizer import OffloadAdamW
    from tierwise.offload.trace import Trace
    from tierwise.offload.verify import BitReport, fingerprint, verify_bits

__all__ = ["OffloadAdamW", "Trace", "BitReport", "fingerprint", "verify_bits"]

_HOME = {
    "OffloadAdamW": "optimizer",
    "Trace": "trace",
    "BitReport": "verify",
    "fingerprint": "verify",
    "verify_bits": "verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
