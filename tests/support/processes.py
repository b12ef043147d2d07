"""The services as real processes over real gRPC: started, watched through their log lines, killed.

Nothing here sleeps in order to be in step with a process: it waits for a log line, a metric or an answer, until a deadline that only a
broken service reaches.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
_POLL_S = 0.02
_ANY_PORT = "127.0.0.1:0"
_COMMON = ("--dtype", "float64", "--device", "cpu", "--threads", "1", "--log-format", "json")

Process = TypeVar("Process", bound="ServiceProcess")


class ServiceProcess:
    """A process that writes JSON lines to standard error.

    Args:
        name: for people.
        command: what to run.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.events: list[dict[str, Any]] = []
        self._lines: deque[str] = deque(maxlen=200)
        self._heard = threading.Condition()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_")}
        environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()

    def wait_for(self, event: str, after: int = 0, **fields: object) -> dict[str, Any]:
        """The first log line of that event and fields among those from number `after` on."""
        deadline = time.monotonic() + DEADLINE_S
        with self._heard:
            while True:
                for line in self.events[after:]:
                    if line.get("event") == event and fields.items() <= line.items():
                        return line
                if self.process.poll() is not None and not self._reader.is_alive():
                    raise AssertionError(f"{self.name} has ended with {self.process.returncode} before {event!r}:\n{self.tail()}")
                if not self._heard.wait(min(0.5, max(0.0, deadline - time.monotonic()))) and time.monotonic() >= deadline:
                    raise AssertionError(f"{self.name} has not said {event!r} within {DEADLINE_S:g} s:\n{self.tail()}")

    def count(self, event: str) -> int:
        """How often it has said so."""
        with self._heard:
            return sum(line.get("event") == event for line in self.events)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def say(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        """SIGKILL, stopped or not."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.kill()
        self._reader.join(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def tail(self, num_lines: int = 40) -> str:
        with self._heard:
            return "\n".join(f"{self.name}| {line}" for line in list(self._lines)[-num_lines:])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._heard:
                self._lines.append(line.rstrip())
                if line.startswith("{"):
                    self.events.append(json.loads(line))
                self._heard.notify_all()
        with self._heard:
            self._heard.notify_all()


class VerifierProcess(ServiceProcess):
    """A verifier on free ports."""

    def listening(self) -> Self:
        """Returns once it answers calls, perhaps still loading."""
        line = self.wait_for("listening")
        self.address, self.link, self.metrics = line["clients"], line["links"], line["metrics"]
        return self

    def serving(self) -> Self:
        self.listening().wait_for("serving")
        return self


class DraftProcess(ServiceProcess):
    """A draft service on free ports."""

    def serving(self) -> Self:
        line = self.wait_for("listening")
        self.address, self.metrics = line["clients"], line["metrics"]
        self.wait_for("serving")
        return self

    def attached(self) -> Self:
        self.serving().wait_for("attached to the verifier")
        return self


class Services:
    """All processes of a test; none outlives it. `launch_*` return at once, so that several load side by side."""

    def __init__(self) -> None:
        self.processes: list[ServiceProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for process in reversed(self.processes):
            process.close()

    def launch_verifier(self, target: Path, *flags: str, name: str = "verifier") -> VerifierProcess:
        return self._launch_verifier(("client.cli",), target, flags, name)

    def launch_large_verifier(
        self, target: Path, *flags: str, seconds: float = 0.02, when: str = "at-once", name: str = "verifier"
    ) -> VerifierProcess:
        """A verifier whose forward passes take `seconds` longer; `when-told`: it loads until a line is said to it."""
        return self._launch_verifier(("tests.support.large_verifier", str(seconds), when), target, flags, name)

    def launch_draft(self, verifier: str, link: str, *flags: str, draft: Path | None = None, name: str = "draft") -> DraftProcess:
        """A draft service; without a draft model it looks guesses up."""
        return self._launch_draft(("client.cli",), verifier, link, flags, draft, name)

    def launch_liar(self, verifier: str, link: str, *flags: str, draft: Path, rate: float, name: str) -> DraftProcess:
        """A draft service whose guesses are made wrong at random."""
        return self._launch_draft(("tests.support.lying_draft", str(rate)), verifier, link, flags, draft, name)

    def show(self) -> None:
        """Prints the end of every log: pytest shows it where a test fails."""
        for process in self.processes:
            sys.stderr.write(process.tail() + "\n")

    def _launch_verifier(self, module: Sequence[str], target: Path, flags: Sequence[str], name: str) -> VerifierProcess:
        own = ("--target", str(target), "--listen", _ANY_PORT, "--link", _ANY_PORT, "--metrics", _ANY_PORT, "--kv-blocks", "1024")
        return self._add(VerifierProcess(name, (sys.executable, "-m", *module, "verifier", *own, *_COMMON, *flags)))

    def _launch_draft(self, module: Sequence[str], verifier: str, link: str, flags: Sequence[str], draft: Path | None, name: str) -> DraftProcess:
        own = ("--verifier", verifier, "--link", link, "--listen", _ANY_PORT, "--metrics", _ANY_PORT, "--name", name, "--kv-blocks", "1024")
        model = ("--draft", str(draft)) if draft is not None else ()
        return self._add(DraftProcess(name, (sys.executable, "-m", *module, "draft", *own, *model, *_COMMON, *flags)))

    def _add(self, process: Process) -> Process:
        self.processes.append(process)
        return process


class Samples:
    """One scrape of a service's metrics."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE_S) as response:
            text = response.read().decode()
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name (without `outrider_`) that have these labels."""
        found = [sample.value for sample in self._samples if sample.name == f"outrider_{name}" and labels.items() <= sample.labels.items()]
        assert found, f"{name} {labels} is not exported"
        return sum(found)


async def scrape(address: str) -> Samples:
    return await asyncio.to_thread(Samples, address)


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Asks again and again until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not await holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}")
        await asyncio.sleep(_POLL_S)
