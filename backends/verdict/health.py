"""Asking a server how it is: seldom while it does well, since every 200 costs it a token and a line in its log."""

from __future__ import annotations

import http.client
import threading
import time

from backends.verdict.observation import HealthAnswer

PATIENCE = 25.0  # seconds; SGLang itself gives up after 20
FIRST_ANSWER = 5.0  # a healthy server takes about one second

# Seconds for which a 200 is good: while requests are answered, each of which says the same; while nothing is asked of
# the server; and where it has work and has logged no batch for a while.
FLOWING = 60.0
IDLE = 15.0
SUSPICIOUS = 5.0


class Health:
    """Asks /health in a thread of its own, since a stuck server takes 20 s to say so.

    `seconds` is how long the last answer took, `answered` when it came and `failing_since` when the first one of those
    was asked for that were no 200, both on the monotonic clock. The first call waits `first_answer` seconds at most:
    who looks only once is to hear the answer.
    """

    def __init__(self, port: int, first_answer: float = FIRST_ANSWER) -> None:
        self.port = port
        self.first_answer = first_answer
        self.seconds: float | None = None
        self.answered = 0.0
        self.failing_since: float | None = None
        self._status: int | None = None
        self._asking = False
        self._first = threading.Event()

    def answer(self, rest: float) -> HealthAnswer:
        """What was answered last, with its age; asks like `ask`."""
        status, now = self.ask(rest), time.monotonic()
        return HealthAnswer(
            status=status,
            seconds=self.seconds,
            age=now - self.answered if self.answered else None,
            failing_for=None if self.failing_since is None else now - self.failing_since,
        )

    def ask(self, rest: float) -> int | None:
        """The HTTP status of the last answer, None where none came; asks anew unless it is a 200 of `rest` seconds."""
        rests = self._status == 200 and time.monotonic() - self.answered < rest
        if not self._asking and not rests:
            self._asking = True
            threading.Thread(target=self._ask, daemon=True).start()
        self._first.wait(self.first_answer)
        self._first.set()
        return self._status

    def _ask(self) -> None:
        begun = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", "/health")
            self._status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            self._status = None
        finally:
            connection.close()
            self.answered = time.monotonic()
            self.seconds = round(self.answered - begun, 3)
            self.failing_since = None if self._status == 200 else self.failing_since or begun
            self._asking = False
            self._first.set()
