"""When each gradient becomes ready in the backward pass: :class:`Timeline`, a value. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient.

    Args:
        name: the parameter's.
        payload_bytes: its size.
        ready_ms: time from the start of backward to the moment when it is ready, in ms.
        dtype: its type, as torch prints it without ``torch.``; a bucket holds one type.

    Raises:
        ValueError: a negative or infinite number.

    """

    name: str
    payload_bytes: int
    ready_ms: float
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.payload_bytes < 0 or not 0 <= self.ready_ms < math.inf:
            raise ValueError(f"no gradient: {self}")


@dataclass(frozen=True)
class Timeline:
    """One training step without communication.

    Args:
        gradients: in the order in which DDP reduces them.
        forward_ms: everything before backward, in ms.
        backward_ms: backward; no gradient is ready later.
        rest_ms: everything after it: optimizer and the rest.

    Raises:
        ValueError: no gradients, or times that contradict each other.

    """

    gradients: tuple[Gradient, ...]
    forward_ms: float
    backward_ms: float
    rest_ms: float

    def __post_init__(self) -> None:
        times = (self.forward_ms, self.backward_ms, self.rest_ms)
        if not self.gradients or not all(0 <= time < math.inf for time in times):
            raise ValueError(f"no timeline: {len(self.gradients)} gradients, {times} ms")
        if max(gradient.ready_ms for gradient in self.gradients) > self.backward_ms:
            raise ValueError("no timeline: a gradient is ready after the end of backward")

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.payload_bytes for gradient in self.gradients)

    @property
    def compute_ms(self) -> float:
        """The step without any communication, in ms."""
        return self.forward_ms + self.backward_ms + self.rest_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; the inverse of :meth:`from_dict`."""
        return asdict(self) | {"gradients": [list(asdict(gradient).values()) for gradient in self.gradients]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Timeline":
        """Build a timeline from :meth:`to_dict`'s output."""
        gradients = tuple(Gradient(*values) for values in data["gradients"])
        return cls(gradients, data["forward_ms"], data["backward_ms"], data["rest_ms"])
