"""Run directories to report on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tf_largebatch as tlb

# What CSVLogger left of a run with LARS, 4 epochs of 125 updates on mnist5k.
HISTORY = (
    "epoch,accuracy,images_per_second,learning_rate,loss,val_accuracy,val_loss\r\n"
    "0,0.2759999930858612,690.387158731747,4.0,2.055070161819458,0.3959999978542328,"
    "1.9871649742126465\r\n"
    "1,0.8222500085830688,947.9107728661979,0.4,0.5597785115242004,0.9359999895095825,"
    "0.26572224497795105\r\n"
    "2,0.9392499923706055,830.7170415844519,0.04000000000000001,0.26351943612098694,"
    "0.9570000171661377,0.19561359286308289\r\n"
    "3,0.949999988079071,372.2757416267417,0.004000000000000001,0.21428516507148743,"
    "0.9570000171661377,0.18971416354179382\r\n"
)
SETTINGS = {
    "dataset": "mnist5k",
    "model": "resnet_small",
    "epochs": 4,
    "per_replica_batch_size": 32,
    "base_learning_rate": 4.0,
    "base_batch_size": 32,
    "warmup": "gradual",
    "warmup_epochs": 1.0,
    "decay_epochs": None,
    "optimizer": "lars",
    "seed": 1,
}
SUMMARY = {"final_val_accuracy": 0.957, "steps": 500, "versions": {"tensorflow": "2.21.0"}}
HOSTILE = '</script><img src="x:y" onerror="document.title=1">\x1b[31m'


def make_run(
    folder: Path,
    *,
    history: str | bytes | None = HISTORY,
    summary: Mapping[str, Any] | None = SUMMARY,
    num_replicas: int = 1,
    **settings: Any,
) -> Path:
    """A run directory, as examples/train.py leaves it."""
    chosen = {**SETTINGS, **settings}
    recipe = tlb.Recipe(
        num_examples=4000,
        num_replicas=num_replicas,
        **{
            field.name: chosen[field.name]
            for field in dataclasses.fields(tlb.Recipe)
            if field.name in chosen
        },
    )
    folder.mkdir(parents=True)
    config = {"run_dir": str(folder), **chosen, "recipe": recipe.to_dict()}
    (folder / "config.json").write_text(json.dumps(config))
    if history is not None:
        contents = history if isinstance(history, bytes) else history.encode()
        (folder / "history.csv").write_bytes(contents)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def hostile_runs(tmp_path: Path) -> list[Path]:
    """A whole run; one that was cut off; one whose texts would be elements, and whose loss ends."""
    cut = HISTORY.replace("val_loss", "val_loss,noise").replace("\r\n", ",7.5\r\n")
    cut = cut.replace("noise,7.5", "noise")[:-40]
    bad = "epoch,loss,val_accuracy,</script ><b>\r\n"
    bad += "0,2.0,0.1,1\r\n1,nan,0.2,2\r\n2,inf,0.3,3\r\n3,1.5,0.4,4\r\n"
    return [
        make_run(tmp_path / "whole"),
        make_run(tmp_path / "cut", history=cut, summary=None, num_replicas=4),
        make_run(tmp_path / "<b>&amp;", history=bad, summary=None, dataset=HOSTILE, model="<i>"),
    ]
