"""What TFRecordSource holds, and allocates while its rows are read: one line of JSON, in bytes.

For `test_global_shuffle_of_records.py`: up to Python 3.12 `tracemalloc.stop()` crashes a process
whose other threads allocate, as those of tf.data do. So tracing ends with the process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tracemalloc

from tf_largebatch.data import GlobalShuffleSharder, TFRecordSource

BATCH, BATCHES = 500, 60

files = json.loads(sys.argv[1])
TFRecordSource(files)  # builds the index, imports what it needs
tracemalloc.start()
source = TFRecordSource(files)
gc.collect()
held, _ = tracemalloc.get_traced_memory()

sharder = GlobalShuffleSharder(source, global_batch_size=BATCH, seed=4)
batches = iter(sharder.train_dataset())
next(batches)
gc.collect()
tracemalloc.reset_peak()
before, _ = tracemalloc.get_traced_memory()
rows = sum(len(next(batches)) for _ in range(BATCHES))
_, peak = tracemalloc.get_traced_memory()
print(json.dumps({"rows": rows, "held": held, "peak": peak - before}), flush=True)
os._exit(0)
