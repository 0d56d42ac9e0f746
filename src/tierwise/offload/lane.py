"""What a device must be able to do: the seam between the optimizer and the hardware.

`CpuLane` trains on the host itself: the device's memory is the host's, so gradients are read
where they lie and copies are memcpy. It is a full back end, and the one the tests run. The CUDA
lane (`tierwise.offload.lane_cuda`) is imported only when parameters are on a CUDA device.

Left out: devices that are neither, and parameters on several devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from tierwise.core.errors import UsageError

Wait = Callable[[], None]
Pair = tuple[Tensor, Tensor]


class Lane(Protocol):
    """Device side of one optimizer."""

    shares_memory: bool  # the host may read and write parameters where they lie

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed host memory that the link can reach, aligned to 64 bytes."""

    def norms(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return each gradient's 2-norm in fp32, computed where the gradient is."""

    def to_host(self, grads: Sequence[Tensor], targets: Sequence[Tensor | None]) -> Wait:
        """Begin to copy gradients into host memory; the result blocks until they have arrived.

        Copies end in the order they were asked for: the last into a target is what stays.
        """

    def to_device(self, pairs: Sequence[Pair]) -> Wait:
        """Copy (parameter, host source) pairs; the result makes the device wait for them."""

    def settle(self) -> None:
        """Let uploads that follow wait for what the device has been told to do so far."""


def _nothing() -> None:
    pass


class CpuLane:
    """The host as its own device."""

    shares_memory = True

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed memory."""
        return torch.zeros(num_elements, dtype=dtype)

    def norms(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return each gradient's 2-norm as `clip_grad_norm_` would compute it in fp32."""
        wide = [grad.float() for grad in grads]  # the same tensor where it is fp32
        return list(torch._foreach_norm(wide)) if wide else []

    def to_host(self, grads: Sequence[Tensor], targets: Sequence[Tensor | None]) -> Wait:
        """Copy where a copy is asked for (the gradient is to be released)."""
        for grad, target in zip(grads, targets, strict=True):
            if target is not None:
                target.copy_(grad)
        return _nothing

    def to_device(self, pairs: Sequence[Pair]) -> Wait:
        """Copy now."""
        with torch.no_grad():
            torch._foreach_copy_([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        return _nothing

    def settle(self) -> None:
        """Need nothing: the host does one thing after another."""


def choose_lane(parameters: Sequence[nn.Parameter]) -> Lane:
    """Return the lane for where the parameters are.

    Raises:
        UsageError: They are on several devices, or on one that has no lane.
    """
    check_one_device(parameters)
    devices = {parameter.device for parameter in parameters}
    kinds = {device.type for device in devices}
    if kinds <= {"cpu"}:
        return CpuLane()
    if kinds == {"cuda"}:
        from tierwise.offload.lane_cuda import CudaLane

        return CudaLane(devices.pop())
    raise UsageError(f"parameters on {kinds.pop()} are not supported", hint="use cpu or cuda")


def check_one_device(parameters: Sequence[nn.Parameter]) -> None:
    """Return if the parameters are all on one device.

    Raises:
        UsageError: They are not.
    """
    names = sorted({str(parameter.device) for parameter in parameters})
    if len(names) > 1:
        raise UsageError(f"parameters are on several devices ({', '.join(names)})")
