"""What a kernel launch needs to know of the machine it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping


class Kernels:
    """Launches kernels on ``device``, compiling each for its constants once.

    Triton looks at every argument of every launch to find the binary (60 to 100 microseconds for
    forty arguments); here the constants alone find it, for the kernels are declared not to be
    specialised on anything else that varies.
    """

    def __init__(self, device: torch.device) -> None:
        self._compiled: dict[Hashable, Any] = {}
        self._emulated = bool(triton.knobs.runtime.interpret)
        # Programmatic dependent launch needs compute capability 9.0 (CUDA C++ Programming Guide).
        on_device = device.type == "cuda" and not self._emulated
        self._dependent = on_device and torch.cuda.get_device_capability(device) >= (9, 0)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        arguments: tuple[object, ...],
        constants: tuple[Hashable, ...],
        options: Mapping[str, Any],
        *,
        variant: Hashable = None,
    ) -> None:
        """Launch ``kernel`` on the current stream.

        ``constants`` are its constexpr parameters in order; PDL and, where it has it, EMU are added
        here. ``variant`` is whatever else the binary depends on.
        """
        key = (id(kernel), constants, variant)  # JIT functions hash slowly, and live for ever
        compiled = self._compiled.get(key)
        names = kernel.arg_names
        machine = (self._dependent, self._emulated)[: 2 if names[-1] == "EMU" else 1]
        if compiled is not None:
            compiled[(*grid, 1)](*arguments, *constants, *machine)
            return
        # Said aloud, since Triton's default for it changes between releases.
        options = {"enable_fp_fusion": True, **options}
        if self._dependent:
            options["launch_pdl"] = True
        self._compiled[key] = kernel[grid](*arguments, *constants, *machine, **options)
