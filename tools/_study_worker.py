"""One worker of a run of `study_warmup.py` with real workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from _study_runs import photo_patches, train, use_one_thread
from _study_settings import Setting
from absl import app, flags

import tf_largebatch as tlb

_SETTING = flags.DEFINE_string("setting", None, "The run, as JSON.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "File of worker 0 for what it gave.", required=True)


def main(_: Sequence[str]) -> None:
    use_one_thread()
    strategy = tlb.LargeBatchStrategy()
    setting = Setting(**json.loads(_SETTING.value))
    outcome = train(setting, photo_patches(split=setting.split), strategy)
    if strategy.topology.is_chief:
        Path(_OUTPUT.value).write_text(json.dumps(outcome))
    strategy.barrier()  # the others leave together with the chief


if __name__ == "__main__":
    app.run(main)
