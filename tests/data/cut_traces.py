"""Cut profiles down to what `ddpopt analyze` reads, so that they are small enough to be committed.

    python tests/data/cut_traces.py OUTPUT_DIRECTORY TRACE...

Of an export of nsys (.sqlite) it keeps the tables of kernels, copies, memory sets, CUDA calls and NVTX ranges, of these
only the columns that the analysis reads and of the calls only those that launch something or synchronise; it writes
NAME.sqlite.gz. Of a trace of torch.profiler (.json or .json.gz) it keeps the same events with the same arguments; it
writes NAME.json.gz. Nothing that names a machine, a user or a path is kept.

The committed traces: two ranks on two H200s, torchvision ViT-B/32, batch 32 per rank, fp32, two steps, static graph,
nsys 2025.3 and torch.profiler in separate runs. cap2000: one bucket, over SHM. cap25: 13 buckets, over SHM. noview: 13
buckets without bucket view, over P2P. callback: `ddpopt nsys` with our NsysCallback, two ranks that share one H200 over
sockets, ViT-L/32 in 11 buckets of 100 MiB, batch 32, three steps. `make_gloo_traces.py` made the gloo ones.
"""

import gzip
import json
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

OPERATION = ["start", "end", "deviceId", "streamId", "correlationId", "globalPid"]
COLUMNS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": [*OPERATION, "shortName"],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [*OPERATION, "bytes", "copyKind", "srcKind", "dstKind"],
    "CUPTI_ACTIVITY_KIND_MEMSET": [*OPERATION, "bytes"],
    "CUPTI_ACTIVITY_KIND_RUNTIME": ["start", "end", "globalTid", "correlationId", "nameId"],
    "NVTX_EVENTS": ["start", "end", "eventType", "text", "textId", "globalTid"],
}
STRINGS = ("shortName", "nameId", "textId")
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "user_annotation", "cuda_runtime", "cuda_driver", "cpu_op")
ARGUMENTS = ("correlation", "stream", "bytes", "Collective name", "In msg nelems", "dtype", "Group size")


def cut_nsys(source: Path, target: Path) -> None:
    """Copy the needed rows and columns into a database of its own, and compress that."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.sqlite"
        connection = sqlite3.connect(small)
        connection.execute("ATTACH ? AS whole", (str(source),))
        there = {row[0] for row in connection.execute("SELECT name FROM whole.sqlite_master")}
        connection.execute("CREATE TABLE META_DATA_EXPORT AS SELECT name, value FROM whole.META_DATA_EXPORT"
                           " WHERE name LIKE 'EXPORT_SCHEMA_VERSION%'")  # fmt: skip
        for table, columns in COLUMNS.items():
            if table in there:
                names = ", ".join(f'"{name}"' for name in columns)
                connection.execute(f"CREATE TABLE {table} AS SELECT {names} FROM whole.{table} ORDER BY start")
        launched = " UNION ".join(f"SELECT correlationId FROM {table}" for table in list(COLUMNS)[:3] if table in there)
        connection.execute(f"DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId NOT IN ({launched}) AND nameId"
                           " NOT IN (SELECT id FROM whole.StringIds WHERE value LIKE '%Synchronize%')")  # fmt: skip
        used = " UNION ".join(
            f"SELECT {name} FROM {table}"
            for table, columns in COLUMNS.items()
            if table in there
            for name in columns
            if name in STRINGS
        )
        connection.execute(f"CREATE TABLE StringIds AS SELECT id, value FROM whole.StringIds WHERE id IN ({used})")
        connection.commit()
        connection.execute("DETACH whole")
        connection.execute("VACUUM")
        connection.close()
        target.write_bytes(gzip.compress(small.read_bytes(), 9, mtime=0))


def cut_kineto(source: Path, target: Path) -> None:
    """Keep the needed events and arguments."""
    raw = source.read_bytes()
    data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    has_gpu = any(event.get("cat") == "kernel" for event in data["traceEvents"])
    events = [event for event in data["traceEvents"] if event.get("ph") == "X" and event.get("cat") in CATEGORIES]
    launched = {event["args"]["correlation"] for event in events if str(event["cat"]) in CATEGORIES[:3]}
    kept = [small(event) for event in events if is_needed(event, launched, has_gpu)]
    made = {"schemaVersion": data["schemaVersion"], "distributedInfo": data["distributedInfo"], "traceEvents": kept}
    target.write_bytes(gzip.compress(json.dumps(made, separators=(",", ":")).encode(), 9, mtime=0))


def is_needed(event: dict[str, Any], launched: set[int], has_gpu: bool) -> bool:
    if event["cat"] == "cpu_op":
        return not has_gpu
    if event["cat"].startswith("cuda_"):
        return event["args"].get("correlation") in launched or "Synchronize" in event["name"]
    return True


def small(event: dict[str, Any]) -> dict[str, Any]:
    args = {name: value for name, value in event.get("args", {}).items() if name in ARGUMENTS}
    kept = {name: event[name] for name in ("ph", "cat", "tid", "ts", "dur")}
    return kept | {"name": event["name"][:64], "args": args}


def main() -> None:
    output = Path(sys.argv[1])
    output.mkdir(parents=True, exist_ok=True)
    for source in map(Path, sys.argv[2:]):
        name = source.name.split(".")[0]
        if source.suffix == ".sqlite":
            cut_nsys(source, output / f"{name}.sqlite.gz")
        else:
            cut_kineto(source, output / f"{name}.json.gz")


if __name__ == "__main__":
    main()
