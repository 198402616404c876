"""A process that does one thing at a time and says how long it took: JSON lines over standard input and output.

The parent keeps several of them alive and lets them work in turns, so that what is compared is measured in one sitting,
each in a process of its own. Imports nothing but the standard library: the peer runs in another Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Task = Callable[[], Any]
"""Work to be timed; returns when all of it is done."""


class Worker:
    """The parent's side."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str] | None = None):
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for the answer.

        Raises:
          RuntimeError: The process ended, or answered with an error.
        """
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line.startswith("{") else {"error": f"no answer, {self._ending(line)}"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {request}: {answer['error']}")
        return answer

    def _ending(self, line: str) -> str:
        if line:
            return f"found {line!r}"
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may have closed its output only
            self._process.wait(5)
        status = self._process.poll()
        return f"the process ended with status {status}" + (" (out of memory?)" if status == -9 else "")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def serve(prepare: Callable[..., Any]) -> None:
    """The worker's side: answers requests until standard input ends.

    {"prepare": name, "task": kind, **arguments} makes a task by `prepare(kind, **arguments)`: one to be timed, or a
    dict, which is the answer. {"run": name, "times": n} runs it n times and answers with seconds and peak memory.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    tasks: dict[str, Task] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _answer(request, tasks, prepare)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def _answer(request: dict[str, Any], tasks: dict[str, Task], prepare: Callable[..., Any]) -> dict[str, Any]:
    if "run" in request:
        seconds = []
        for _ in range(request.get("times", 1)):
            start = time.perf_counter()
            tasks[request["run"]]()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "peak_bytes": peak_bytes()}
    name = request.pop("prepare")
    made = prepare(request.pop("task"), **request)
    if isinstance(made, dict):
        return made
    tasks[name] = made
    return {"peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
