"""Reports of nsys that hold exactly what a test says. Times in microseconds."""

import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Any

PROCESS = 77 * 2**24
MAIN, AUTOGRAD = PROCESS + 1, PROCESS + 2
COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 17
HTOD, DTOH, DTOD = 1, 2, 8
PAGEABLE, PINNED, DEVICE = 0, 1, 2
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"

KERNEL, MEMCPY, MEMSET = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
TEXTS = ("shortName", "nameId", "textId")
RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
SESSION = "TARGET_INFO_SESSION_START_TIME"


class Report:
    """Rows of the tables of an export, and the file of them."""

    def __init__(self, offset_us: float = 0, process: int = PROCESS, device: int = 0) -> None:
        self._offset_us, self._move, self._device = offset_us, process - PROCESS, device
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._correlation = 100

    def kernel(self, start: float, end: float, launch: float, thread: int = AUTOGRAD, name: str = "gemm") -> None:
        stream = COMMUNICATION_STREAM if name.startswith("nccl") else COMPUTE_STREAM
        self._operation(KERNEL, start, end, launch, thread, stream, shortName=self._string(name))

    def all_reduce(self, start: float, end: float, launch: float, thread: int = AUTOGRAD) -> None:
        self.kernel(start, end, launch, thread, ALL_REDUCE)

    def copy(self, start: float, end: float, launch: float, kind: int, size_bytes: int, thread: int = MAIN,
             source: int = PINNED) -> None:  # fmt: skip
        self._operation(MEMCPY, start, end, launch, thread, COMPUTE_STREAM, bytes=size_bytes, copyKind=kind,
                        srcKind=DEVICE if kind == DTOD else source, dstKind=DEVICE)  # fmt: skip

    def call(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self._correlation += 1
        self._add(RUNTIME, start=self._ns(start), end=self._ns(end), globalTid=thread + self._move,
                  correlationId=self._correlation, nameId=self._string(name))  # fmt: skip

    def span(self, name: str, start: float, end: float | None, thread: int = MAIN, is_registered: bool = True,
             json: str | None = None) -> None:  # fmt: skip
        text = {"text": None, "textId": self._string(name)} if is_registered else {"text": name, "textId": None}
        self._add(NVTX, start=self._ns(start), end=None if end is None else self._ns(end), eventType=59,
                  globalTid=thread + self._move, jsonText=json, **text)  # fmt: skip

    def session(self, start_us: float) -> None:
        """Unix time of the clock's zero."""
        self._add(SESSION, utcEpochNs=round(start_us * 1000))

    def add(self, other: "Report") -> None:
        """Take over the rows of another process."""
        back = {number: text for text, number in other._strings.items()}
        for table, rows in other.tables.items():
            for row in rows:
                texts = {name: self._string(back[row[name]]) for name in TEXTS if row.get(name)}
                self._add(table, **(row | texts))

    def step(
        self, number: int, at: float, all_reduce: tuple[float, float] | None = (50, 90), length: float = 100
    ) -> None:
        """A step of 100 us: batch until 10, forward until 30, backward from 30 to 70, the optimizer from 90 to 95."""
        self.span(f"Batch {number}", at, at + length)
        self.span("get batch", at, at + 8)
        self.copy(at + 5, at + 9, at + 2, HTOD, 1000)
        self.span("forward", at + 8, at + 25)
        self.kernel(at + 10, at + 20, at + 9, MAIN)
        self.kernel(at + 20, at + 30, at + 10, MAIN)
        self.span("backward", at + 26, at + 80)
        self.kernel(at + 30, at + 70, at + 28)
        if all_reduce is not None:
            self.all_reduce(at + all_reduce[0], at + all_reduce[1], at + 45)
        self.span("optimizer step", at + 81, at + 88)
        self.kernel(max(at + 90, at + all_reduce[1]) if all_reduce else at + 90,
                    (max(at + 90, at + all_reduce[1]) if all_reduce else at + 90) + 5, at + 82, MAIN)  # fmt: skip

    def write(self, path: Path, without: Collection[str] = ()) -> Path:
        """Write the export; ``without`` names tables, or ``TABLE.column``, that it lacks."""
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as connection:
            strings = [{"id": number, "value": text} for text, number in self._strings.items()]
            for table, rows in {**self.tables, "StringIds": strings}.items():
                if table in without or not rows:
                    continue
                names = [name for name in rows[0] if f"{table}.{name}" not in without]
                connection.execute(f"CREATE TABLE {table} ({', '.join(names)})")
                connection.executemany(
                    f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})",
                    [[row.get(name) for name in names] for row in rows],
                )
        connection.close()
        return path

    def _operation(
        self, table: str, start: float, end: float, launch: float, thread: int, stream: int, **more: Any
    ) -> None:
        self.call(
            "cudaLaunchKernel_v7000" if table == KERNEL else "cudaMemcpyAsync_v3020", launch, launch + 0.5, thread
        )
        self._add(table, start=self._ns(start), end=self._ns(end), deviceId=self._device, streamId=stream,
                  correlationId=self._correlation, globalPid=PROCESS + self._move, **more)  # fmt: skip

    def _add(self, table: str, **row: Any) -> None:
        self.tables.setdefault(table, []).append(row)

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def _ns(self, us: float) -> int:
        return round((us + self._offset_us) * 1000)
