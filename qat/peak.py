"""How much memory and time a stage takes. Does not import torch."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil


class Peak:
    """Peak memory while the context is open: `rss_gb` of this process, `gpu_gb` allocated by torch (None without CUDA).

    The kernel's own high-water mark (VmHWM) is reset and read where it lets us; elsewhere a thread samples the resident
    size every 20 ms. `by` says which. Mapped file pages count as resident, as everywhere.
    """

    rss_gb: float
    gpu_gb: float | None = None

    def __enter__(self) -> Peak:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.by = "VmHWM"
        except OSError:
            self.by = "sampled"
            self._stop, self._highest = threading.Event(), 0
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        if cuda := _cuda():
            cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        if self.by == "VmHWM":
            status = Path("/proc/self/status").read_text()
            self.rss_gb = int(status.split("VmHWM:")[1].split()[0]) / 2**20
        else:
            self._stop.set()
            self._thread.join()
            self.rss_gb = self._highest / 2**30
        if cuda := _cuda():
            self.gpu_gb = cuda.max_memory_allocated() / 2**30

    def _sample(self) -> None:
        process = psutil.Process()
        while True:
            self._highest = max(self._highest, process.memory_info().rss)
            if self._stop.wait(0.02):
                return


def _cuda() -> Any:
    """torch.cuda when torch is imported and uses a device; this module does not import it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None
