"""Latency of the parent and of exports, each served by the engine in turn."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import psutil

from qat import plugins

KEYS = ("first_token_s", "inter_token_s", "tokens_per_s")
START_SECONDS = 1800  # a large model is compiled for minutes
BENCH_SECONDS = 3600  # one benchmark: a server that hangs would hold the gate for ever
LINES = 12  # of the engine's log in an error
Progress = Callable[[str], Any]  # told the name of what was measured
# a proxy is for other hosts
NO_PROXY = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
DIRECT = build_opener(ProxyHandler({}))


def measure(
    folders: Mapping[str, Path], dtype: str, asked: Mapping[str, Any], progress: Progress = lambda name: None
) -> dict[str, dict[str, Any]]:
    """name -> {memory_gb, batches: batch -> {first_token_s, inter_token_s, tokens_per_s}, one for each pair}.

    folders: the parent's first. dtype: to serve in. asked: options of gate/latency.py. Of an export that the engine
    does not serve: {error: its last words}. Raises ValueError when that is the parent.
    """
    engine = plugins.find("gate.servers", asked["engine"])
    found: dict[str, dict[str, Any]] = {
        name: {"batches": {str(batch): {key: [] for key in KEYS} for batch in asked["batches"]}} for name in folders
    }
    names = list(folders)
    for pair in range(asked["pairs"]):
        turn = pair % len(names)
        for name in names[turn:] + names[:turn]:
            if "error" in found[name]:
                continue
            try:
                _once(engine, folders[name], dtype, asked, found[name])
            except ValueError as error:
                if name == names[0]:
                    raise ValueError(f"gate.latency: {asked['engine']} does not serve {name}: {error}") from error
                found[name] = {"error": str(error)}
            progress(name)
    return found


def _once(engine: Any, folder: Path, dtype: str, asked: Mapping[str, Any], into: dict[str, Any]) -> None:
    """Start the engine, run its benchmark for each batch, add the numbers."""
    with tempfile.TemporaryDirectory(prefix="tare-") as work:
        log, port = Path(work, "log"), _free_port()
        command = engine.serve(asked["program"], folder, port, dtype, max(asked["batches"]), asked["arguments"])
        environment = {**os.environ, **NO_PROXY, **engine.ENVIRONMENT}
        with _running(command, log, environment) as server:
            _wait(server, log, f"http://127.0.0.1:{port}{engine.HEALTH}")
            for batch, numbers in into["batches"].items():
                out, sizes = Path(work, f"{batch}.json"), (asked["prompt_tokens"], asked["output_tokens"])
                words = engine.bench(asked["program"], folder, port, int(batch), *sizes, out)
                try:
                    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=BENCH_SECONDS)
                except subprocess.TimeoutExpired as error:
                    raise ValueError(f"its benchmark did not end in {BENCH_SECONDS} s") from error
                if done.returncode or not out.is_file():
                    raise ValueError(_told(f"its benchmark ended with {done.returncode}", done.stdout + done.stderr))
                for key, value in engine.read(out).items():
                    numbers[key].append(value)
            if server.poll() is not None:
                raise ValueError(f"it ended with {server.returncode} while it served")
            weights = engine.weights_gb(log.read_text(encoding="utf-8", errors="replace"))
            into["memory_gb"] = weights or max(into.get("memory_gb", 0.0), _resident_gb(server))


@contextmanager
def _running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process group of its own, which is gone afterwards."""
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            yield server
        finally:
            for how, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, None)):
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(patience)


def _wait(server: subprocess.Popen[bytes], log: Path, address: str) -> None:
    """Until the server answers. Raises ValueError with its last words when it ends or takes too long."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with suppress(URLError, ConnectionError, TimeoutError), DIRECT.open(address, timeout=5):
            return
        if server.poll() is not None:
            break
        time.sleep(0.2)
    how = "it is not ready" if server.returncode is None else f"it ended with {server.returncode}"
    raise ValueError(_told(how, log.read_text(encoding="utf-8", errors="replace")))


def _told(how: str, text: str) -> str:
    """How a program ended, and its last words."""
    last = " | ".join(line.strip() for line in text.strip().splitlines()[-LINES:])[-2000:]
    return f"{how}: {last}" if last else f"{how} and said nothing"


def _resident_gb(server: subprocess.Popen[bytes]) -> float:
    """What the server and its children hold of this machine's memory."""
    total = 0
    for process in (psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 1e9


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
