"""What the agent says, frame by frame: small answers go before large ones that wait, so that a log or a dataset that is
read over the same link delays no sample by more than the one frame that is under way.
"""

from __future__ import annotations

import threading
from typing import BinaryIO

SMALL = 256 << 10  # bytes; a sample of eight GPUs has some 20 kB


class Outbox:
    """The one way to a stream; may be used from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._turn = threading.Condition()
        self._busy = False
        self._small_ones = 0  # that wait

    def send(self, frame: bytes) -> None:
        """Write a frame; returns once it is on its way. Raises OSError where nobody listens any more."""
        small = len(frame) <= SMALL
        with self._turn:
            self._small_ones += small
            self._turn.wait_for(lambda: not self._busy and (small or not self._small_ones))
            self._small_ones -= small
            self._busy = True
        try:
            self._stream.write(frame)
            self._stream.flush()
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()
