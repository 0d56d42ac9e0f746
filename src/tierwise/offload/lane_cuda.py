"""The CUDA lane: pinned slabs, one stream each way, events between them. Never imported on a CPU.

```
 main stream    backward ... | event: gradient written     forward of block waits on `arrived`
 down stream    waits ------> copy to pinned memory, event: host may read
 up stream      waits for the main stream's work at step(), copies weights, event: arrived
```

Hazards kept in mind: memory is pinned in slabs when the optimizer is made, never in a hook; the
two streams are made once; a gradient copied on the down stream is recorded there, so that its
memory is not reused early; a host buffer is written only after the copy that read it has ended;
events are waited for on worker threads, with the interpreter lock released.

Left out: several devices, and uploads enqueued before their data is ready.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierwise.offload.lane import Pair, Wait


class CudaLane:
    """One CUDA device and the link to it."""

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed pinned memory."""
        return torch.zeros(num_elements, dtype=dtype, pin_memory=True)

    def norms(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return each gradient's 2-norm in fp32, on the device; nothing waits."""
        wide = [grad.float() for grad in grads]
        return list(torch._foreach_norm(wide)) if wide else []

    def to_host(self, grads: Sequence[Tensor], targets: Sequence[Tensor | None]) -> Wait:
        """Begin copies on the down stream; the result blocks the calling thread until they end."""
        main = torch.cuda.current_stream(self._device)
        self._down.wait_stream(main)
        with torch.cuda.stream(self._down), torch.no_grad():
            for grad, target in zip(grads, targets, strict=True):
                assert target is not None
                target.copy_(grad, non_blocking=True)
                grad.record_stream(self._down)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(self._down)
        return arrived.synchronize

    def to_device(self, pairs: Sequence[Pair]) -> Wait:
        """Begin copies on the up stream, and see them end before the host buffers can change.

        Called on a worker thread. The result makes the device's current stream wait for them.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._up), torch.no_grad():
            for param, source in pairs:
                param.copy_(source, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._up)
        arrived.synchronize()

        def wait() -> None:
            torch.cuda.current_stream(self._device).wait_event(arrived)

        return wait

    def settle(self) -> None:
        """Let the up stream wait for what the main stream has been told to do so far."""
        self._up.wait_stream(torch.cuda.current_stream(self._device))
