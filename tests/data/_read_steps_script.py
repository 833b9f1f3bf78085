"""Reads a shuffled epoch of numbered TFRecords, from a state if one is given.

A line of JSON a step: the state before it and the records of all workers. For
`test_global_shuffle_of_records.py`, which kills it.
"""

from __future__ import annotations

import json
import sys

from tests.data._helpers import OneWorkerOf
from tf_largebatch.data import GlobalShuffleSharder, TFRecordSource

files, workers, state = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
sharder = GlobalShuffleSharder(TFRecordSource(files), global_batch_size=60, seed=11)
state = state or sharder.state(epoch=2, step=0)
parts = [
    sharder.rest_of_epoch(state, OneWorkerOf(index=index, workers=workers, local_replicas=1))
    for index in range(workers)
]
for step, records in enumerate(zip(*parts, strict=True), start=state["step"]):
    numbers = [int(record) for part in records for record in part.numpy()]
    print(json.dumps([sharder.state(epoch=2, step=step), numbers]), flush=True)
