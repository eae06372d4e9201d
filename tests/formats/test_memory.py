"""A file of any length is read in the memory of a few records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Not getrusage's peak: a process inherits that of the one that started it. From before the first record, since the
# first may have brought the whole file in.
_MEASURE = """
import sys
import pyarrow.parquet
from trace_fast.formats import read_rollouts

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

before = peak()
count = sum(1 for _ in read_rollouts(sys.argv[1]))
print(count, (peak() - before) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status to measure peak memory")
@pytest.mark.parametrize("container", ["jsonl", "json", "parquet"])
def test_a_long_file_is_read_in_constant_memory(tmp_path: Path, container: str) -> None:
    path = tmp_path / f"long.{container}"
    record = {
        "input_ids": [1, 2, 3, 4],
        "boundaries": [1, 3, 4],
        "answer_ids": [7],
        "opener_ids": [9],
        "note": "some text here " * 7000,  # 105 KB
    }
    line = json.dumps(record).encode()
    count = 2000
    if container == "parquet":  # one row group, so that only its pages can be read one after the other
        table = pa.concat_tables([pa.Table.from_pylist([record])] * count)
        pq.write_table(table, path, row_group_size=count, compression="none", use_dictionary=False)
    else:
        with path.open("wb") as file:
            file.write(b"[" if container == "json" else b"")
            for i in range(count):
                file.write((b"," if container == "json" and i else b"") + line + b"\n")
            file.write(b"]" if container == "json" else b"")
    assert path.stat().st_size > 200_000_000
    command = [sys.executable, "-c", _MEASURE, str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    path.unlink()
    assert int(output[0]) == count
    assert int(output[1]) < 100  # MB
